//! The steps of one simulated engine one by one: who was scheduled in each with how many tokens, and who was preempted.

/// A step for each entry of `composed_s`; what belongs to step `i` lies between the ends of step `i - 1` and its own.
#[derive(Clone, Debug, Default)]
pub struct StepLog {
    /// When each step was composed, in seconds on the clock of the arrivals.
    pub composed_s: Vec<f64>,
    /// End of each step's part of `request` and `tokens`.
    pub ends: Vec<u64>,
    /// Requests scheduled, in no order.
    pub request: Vec<u32>,
    /// Tokens that each was scheduled for.
    pub tokens: Vec<u32>,
    /// End of each step's part of `preempted`.
    pub preempted_ends: Vec<u64>,
    /// Requests that were preempted since the step before, in that order.
    pub preempted: Vec<u32>,
}

impl StepLog {
    /// A request has lost its KV cache.
    pub(super) fn preempt(&mut self, id: u32) {
        self.preempted.push(id);
    }

    /// A step has been composed.
    pub(super) fn step(&mut self, composed_s: f64, scheduled: &[(u32, u32)]) {
        self.composed_s.push(composed_s);
        for &(id, tokens) in scheduled {
            self.request.push(id);
            self.tokens.push(tokens);
        }
        self.ends.push(self.request.len() as u64);
        self.preempted_ends.push(self.preempted.len() as u64);
    }
}
