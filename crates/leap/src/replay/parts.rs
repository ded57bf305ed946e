//! What a simulated engine owns beside its requests: seats, KV blocks, decode slots, evictions, and what is written down.

use super::blocks::{BlockPool, Held};
use super::config::EngineConfig;
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
