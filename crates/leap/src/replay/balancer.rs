//! Which rank of a deployment a request goes to: the rule of vLLM's internal load balancer, with the counts as old as
//! they are there.

/// Least time between two publications of the ranks' counts.
const PUBLISH_S: f64 = 0.1;
/// What a waiting request weighs against a running one.
const WAITING_WEIGHT: u32 = 4;

/// Requests of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) waiting: u32,
    pub(super) running: u32,
}

/// The client's view of its ranks. A rank reports after each step that it composes, a coordinator publishes what has
/// changed at most every 100 ms, and in between the client adds the requests that it sends out itself.
#[derive(Clone, Debug)]
pub(super) struct Balancer {
    /// As the client sees them.
    seen: Vec<Counts>,
    /// As last reported to the coordinator.
    reported: Vec<Counts>,
    published_s: f64,
    /// When the coordinator will publish; infinite when nothing has changed since.
    due_s: f64,
    start: usize,
}

impl Balancer {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            seen: vec![Counts::default(); ranks],
            reported: vec![Counts::default(); ranks],
            published_s: f64::NEG_INFINITY,
            due_s: f64::INFINITY,
            start: 0,
        }
    }

    /// What the ranks hold from `now` on.
    pub(super) fn report(&mut self, now: f64, counts: impl IntoIterator<Item = Counts>) {
        self.catch_up(now);
        let mut changed = false;
        for (reported, counts) in self.reported.iter_mut().zip(counts) {
            changed |= *reported != counts;
            *reported = counts;
        }
        if changed && self.due_s.is_infinite() {
            self.due_s = now.max(self.published_s + PUBLISH_S);
        }
    }

    /// The rank for a request that is sent at `now`.
    pub(super) fn choose(&mut self, now: f64) -> usize {
        self.catch_up(now);
        let ranks = self.seen.len();
        // Of equal ones the first in turn.
        let in_turn = (0..ranks).map(|i| (self.start + i) % ranks);
        let score = |&rank: &usize| WAITING_WEIGHT * self.seen[rank].waiting + self.seen[rank].running;
        let chosen = in_turn.min_by_key(score).unwrap_or(0);
        self.start = (self.start + 1) % ranks;
        self.seen[chosen].waiting += 1;
        chosen
    }

    fn catch_up(&mut self, now: f64) {
        if self.due_s <= now {
            self.seen.copy_from_slice(&self.reported);
            self.published_s = self.due_s;
            self.due_s = f64::INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: [(u32, u32); 3]) -> [Counts; 3] {
        pairs.map(|(waiting, running)| Counts { waiting, running })
    }

    #[test]
    fn a_burst_goes_round() {
        let mut balancer = Balancer::new(3);
        let chosen: Vec<usize> = (0..7).map(|_| balancer.choose(0.0)).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn one_that_waits_weighs_as_much_as_four_that_run() {
        let mut balancer = Balancer::new(3);
        balancer.report(0.0, counts([(1, 0), (0, 3), (0, 4)]));
        // 4, 3, 4: the second; then 4, 7, 4 in turn from the second on: the third; then 4, 7, 8.
        assert_eq!([0.0, 0.0, 0.0].map(|now| balancer.choose(now)), [1, 2, 0]);
    }

    #[test]
    fn counts_are_published_at_most_every_100_ms_and_replace_what_the_client_added() {
        let mut balancer = Balancer::new(3);
        balancer.report(1.0, counts([(0, 9), (0, 9), (0, 1)]));
        // 9, 9, 1; then 9, 9, 5; then three nines, and the third is in turn.
        assert_eq!([1.0, 1.0, 1.0].map(|now| balancer.choose(now)), [2, 2, 2]);
        balancer.report(1.02, counts([(0, 0), (0, 9), (0, 9)]));
        // Still 9, 9, 13, in turn from the first on.
        assert_eq!(balancer.choose(1.09), 0);
        // Reported after that publication was due, so not in it.
        balancer.report(1.11, counts([(0, 9), (0, 0), (0, 9)]));
        assert_eq!(balancer.choose(1.12), 0);
        assert_eq!(balancer.choose(1.21), 1);
        // Nothing new since: what is reported then goes out at once.
        balancer.report(5.0, counts([(0, 9), (0, 9), (0, 0)]));
        assert_eq!(balancer.choose(5.0), 2);
    }
}
