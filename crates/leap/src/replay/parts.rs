//! What a simulated engine owns beside its requests: seats, KV blocks, decode slots, evictions, predictions on their way,
//! and what is written down.

use std::collections::VecDeque;

use super::blocks::{BlockPool, Held};
use super::config::EngineConfig;
use super::encoder::Encoder;
use super::outcome::Control;
use super::policy::PolicySpec;
use super::steps::StepLog;
use super::timeline::Recorder;
use crate::levers::{Evictor, Running, Slots};

/// Who holds a seat. Residents in neither list decode, or their last token is under way.
#[derive(Default)]
pub(super) struct Seats {
    /// All holders, in no order.
    pub(super) residents: Vec<u32>,
    /// Residents that prefill, in order of admission.
    pub(super) prefilling: Vec<u32>,
    /// Residents that could decode and do not.
    pub(super) ready: Vec<u32>,
    /// Places in vLLM's running list that have been given out.
    pub(super) places: u64,
}

/// The KV cache.
pub(super) struct Kv {
    pub(super) pool: BlockPool,
    /// Blocks handed out to the step that is being composed, until it is known to whom.
    pub(super) reserved: Vec<Held>,
    /// The request that last found a seat but no blocks, and the pool's gains then.
    pub(super) blocked: Option<(u32, u64)>,
}

impl Kv {
    pub(super) fn new(config: &EngineConfig) -> Self {
        Self { pool: BlockPool::new(config.usable_blocks()), reserved: Vec::new(), blocked: None }
    }
}

/// Who decodes, and when that has to be asked again.
pub(super) struct DecodeSlots {
    pub(super) rule: Slots,
    pub(super) list: Running,
    pub(super) changed: bool,
    /// Whether somebody was without a slot in the last composed step.
    pub(super) bound: bool,
    /// The step at which the choice may come out otherwise although nobody came or went.
    pub(super) next_choice: u64,
}

impl DecodeSlots {
    pub(super) fn new(config: &EngineConfig, spec: &PolicySpec) -> Self {
        let (slots, tokens) = (config.slots() as usize, config.max_num_batched_tokens as usize);
        Self {
            rule: Slots::new(slots, spec.wait_cap_steps, spec.hysteresis),
            list: Running::new(slots, tokens, config.block_size as usize, 1),
            changed: true,
            bound: false,
            next_choice: 0,
        }
    }
}

/// Who gives way to the first of the queue.
pub(super) struct Evictions {
    pub(super) evictor: Evictor,
    /// The first of the queue, if the last composed step refused it a seat or blocks.
    pub(super) refused: Option<u32>,
}

impl Evictions {
    pub(super) fn new(spec: &PolicySpec) -> Self {
        Self { evictor: Evictor::new(spec.evict_factor, spec.evict_per_s), refused: None }
    }
}

/// Predictions that come a while after their requests.
pub(super) enum Coming {
    /// Another predictor's: each so long after its request, however many are on their way.
    Scores { delay_s: f64, due: VecDeque<(f64, u32)> },
    /// The text readout's, once the encoder has read the prompt.
    Rows(Encoder),
}

impl Coming {
    pub(super) fn new(spec: &PolicySpec) -> Self {
        if spec.has_readout() {
            Self::Rows(Encoder::new(spec.encoder_s))
        } else {
            Self::Scores { delay_s: spec.delay_s, due: VecDeque::new() }
        }
    }

    /// One is to come for a request that was sent at `at_s`.
    pub(super) fn expect(&mut self, id: u32, at_s: f64) {
        match self {
            Self::Scores { delay_s, due } => due.push_back((at_s + *delay_s, id)),
            Self::Rows(encoder) => encoder.ask(id, at_s),
        }
    }

    /// Nobody waits any more for what was to come for a request.
    pub(super) fn forget(&mut self, id: u32, now: f64) {
        if let Self::Rows(encoder) = self {
            encoder.forget(id, now);
        }
    }

    /// The next request whose prediction has come by now.
    pub(super) fn take(&mut self, now: f64) -> Option<u32> {
        match self {
            Self::Scores { due, .. } => {
                due.front().filter(|&&(at, _)| at <= now)?;
                due.pop_front().map(|(_, id)| id)
            }
            Self::Rows(encoder) => encoder.take(now),
        }
    }

    /// When the next comes.
    pub(super) fn next_s(&self) -> Option<f64> {
        match self {
            Self::Scores { due, .. } => due.front().map(|&(at, _)| at),
            Self::Rows(encoder) => encoder.next_s(),
        }
    }
}

/// What is written down, where somebody wants to know.
pub(super) struct Written {
    pub(super) recorder: Option<Recorder>,
    pub(super) log: Option<StepLog>,
}

impl Written {
    pub(super) fn new(control: &Control) -> Self {
        Self { recorder: control.timeline.then(Recorder::default), log: control.steps.then(StepLog::default) }
    }
}
