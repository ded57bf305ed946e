//! What the simulated engine remembers of a request, and what a composed step does.

use super::blocks::Held;
use super::cost::Work;

/// A request inside the engine.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) prompt: u32,
    pub(super) output: u32,
    /// Tokens generated when it last left the decode set.
    pub(super) generated: u32,
    /// Tokens stored when it last left the decode set.
    pub(super) computed: u32,
    /// Blocks held, or, of a request that was preempted, those it held; then `computed` is what is cached of them.
    pub(super) blocks: Vec<Held>,
    pub(super) is_resident: bool,
    /// Place in vLLM's running list: in the order of admissions until the slots lever arranges it.
    pub(super) admitted: u64,
    /// When it was admitted the first time.
    pub(super) admitted_s: f64,
    pub(super) preemptions: u32,
    /// Step that gave it its last token.
    pub(super) last_decode_step: u64,
    /// Step in which it last decoded, its prefills left out.
    pub(super) decoded_step: u64,
    /// Step that gave it its last token, prefills counted, and whether the step before that gave the token before.
    pub(super) token_step: u64,
    pub(super) in_a_row: bool,
    pub(super) last_token_s: f64,
    pub(super) first_token_s: f64,
    pub(super) finish_s: f64,
}

/// What an engine counts while it runs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) preemptions: u64,
    pub(super) wait_cap_promotions: u64,
    pub(super) cached_tokens: u64,
    pub(super) computed_tokens: u64,
    pub(super) recomputed_tokens: u64,
}

/// A composed step.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) work: Work,
    /// Requests whose prefill ends in it.
    pub(super) prefilled: Vec<u32>,
    /// Requests whose last token it generates.
    pub(super) done: Vec<u32>,
    /// Those that decode again after a pause, with the time of their last token.
    pub(super) resumed: Vec<(u32, f64)>,
    /// Somebody lost its blocks in it, so the next step may admit again.
    pub(super) preempted: bool,
    pub(super) blocked_by_memory: bool,
    pub(super) blocked_by_seats: bool,
    /// Tokens that those who come back compute again.
    pub(super) recomputed: u32,
    /// Who is scheduled with how many tokens, where steps are logged.
    pub(super) scheduled: Vec<(u32, u32)>,
}
