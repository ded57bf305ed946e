//! The evict lever: which residents give their KV cache to a request that waits and is better by a stated factor.

use std::cmp::Reverse;

use super::rank_of_key;

/// After a look at all residents that found nobody, the next one is not before so many seconds.
const LOOK_S: f64 = 0.05;

/// What the first of the queue lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Its key; smaller is better.
    pub key: f64,
    /// Blocks that it needs, those that it may find cached included.
    pub blocks: usize,
    /// Whether it lacks a seat as well.
    pub seat: bool,
}

/// A resident that may be made to give way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Its key; larger is worse.
    pub key: f64,
    /// Place in the order of arrival: of equal keys the last gives way first.
    pub number: u64,
}

/// Says who is to be evicted, at most so many a second.
#[derive(Clone, Debug)]
pub struct Evictor {
    ln_factor: f64,
    per_s: f64,
    next_s: f64,
    evicted: u64,
}

impl Evictor {
    /// A resident must be worse by `factor`; `per_s` 0 evicts nobody.
    pub fn new(factor: f64, per_s: f64) -> Self {
        Self { ln_factor: factor.ln(), per_s, next_s: f64::NEG_INFINITY, evicted: 0 }
    }

    /// Whether anybody may be evicted at `now_s`.
    pub fn ready(&self, now_s: f64) -> bool {
        self.per_s > 0.0 && now_s >= self.next_s
    }

    /// When somebody may be evicted next, where that is after `now_s`.
    pub fn next_s(&self, now_s: f64) -> Option<f64> {
        (self.per_s > 0.0 && self.next_s > now_s).then_some(self.next_s)
    }

    /// How many have been evicted.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Indices of those who give way: the worst first, each worse than the claim by the factor, as many as make room;
    /// nobody where all of them would not. `blocks` says how many come free with a candidate: those nobody shares.
    pub fn victims(
        &mut self,
        claim: &Claim,
        candidates: &[Candidate],
        mut blocks: impl FnMut(usize) -> usize,
        free_blocks: usize,
        now_s: f64,
    ) -> Vec<usize> {
        if !self.ready(now_s) {
            return Vec::new();
        }
        let bar = claim.key + self.ln_factor;
        let mut worse: Vec<usize> = (0..candidates.len()).filter(|&i| candidates[i].key > bar).collect();
        worse.sort_unstable_by_key(|&i| Reverse((rank_of_key(candidates[i].key), candidates[i].number)));
        let (mut free, mut seats) = (free_blocks, usize::from(!claim.seat));
        let mut enough = 0;
        while enough < worse.len() && (free < claim.blocks || seats == 0) {
            free += blocks(worse[enough]);
            seats += 1;
            enough += 1;
        }
        if enough == 0 || free < claim.blocks || seats == 0 {
            self.next_s = now_s + LOOK_S;
            return Vec::new();
        }
        worse.truncate(enough);
        self.next_s = now_s + enough as f64 / self.per_s;
        self.evicted += enough as u64;
        worse
    }
}
