//! What a simulation leaves behind, and how a caller watches and stops it.

use std::sync::atomic::{AtomicBool, AtomicU64};

use super::gaps::Gaps;
use super::steps::StepLog;
use super::timeline::Timeline;

/// How a caller watches and stops running simulations.
#[derive(Debug, Default)]
pub struct Control {
    /// Set to stop every simulation soon.
    pub cancel: AtomicBool,
    /// Requests finished so far, over all simulations.
    pub finished: AtomicU64,
    /// Requests that all simulations together will finish; 0 until known.
    pub total: AtomicU64,
    /// Whether outcomes hold what the engine held over time.
    pub timeline: bool,
    /// Whether outcomes hold every step of a single engine.
    pub steps: bool,
}

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// Row of the trace.
    pub row: u32,
    /// Times it lost its KV cache.
    pub preemptions: u32,
    /// Planned arrival in seconds.
    pub arrival_s: f64,
    /// When the scheduler first gave it a seat, in seconds.
    pub admitted_s: f64,
    /// End of the step with the first token, in seconds.
    pub first_token_s: f64,
    /// End of the step with the last token, in seconds.
    pub finish_s: f64,
    /// Predicted tokens by [`Kind`](crate::readout::Kind) of readout; NaN where nothing was predicted.
    pub predicted: [f32; 3],
}

impl Record {
    /// Predicted tokens by the last of the readouts that said anything; NaN where none did.
    pub fn best_predicted(&self) -> f32 {
        self.predicted.iter().copied().rfind(|tokens| !tokens.is_nan()).unwrap_or(f32::NAN)
    }
}

/// What one simulation shows.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The requests in order of arrival.
    pub records: Vec<Record>,
    /// Inter-token latencies, pooled.
    pub gaps: Gaps,
    /// Engine steps.
    pub steps: u64,
    /// Steps after whose composition somebody still waited.
    pub steps_with_queue: u64,
    /// Steps in which the next request found a seat but no KV blocks.
    pub steps_blocked_by_memory: u64,
    /// Steps in which the next request found no seat.
    pub steps_blocked_by_seats: u64,
    /// Times that a resident lost its KV cache, for want of blocks or to the evict lever.
    pub preemptions: u64,
    /// Times that a cap on waiting put somebody before one with a better key, in the queue or the slots.
    pub wait_cap_promotions: u64,
    /// Tokens that steps computed, prompts and answers alike.
    pub computed_tokens: u64,
    /// Those of them that preempted requests computed again.
    pub recomputed_tokens: u64,
    /// Steps in which admission control held the first of the queue back.
    pub admission_holds: u64,
    /// What residents came to hold over what admission control had predicted; none where it predicted nothing.
    pub kv_peak_ratio: Option<f64>,
    /// Prompt tokens taken from the prefix cache.
    pub cached_tokens: u64,
    /// Seconds in the waiting queue, over all requests.
    pub waited_s: f64,
    /// What the engine held over time, where that was asked for.
    pub timeline: Option<Timeline>,
    /// Every step, where that was asked for.
    pub log: Option<StepLog>,
}
