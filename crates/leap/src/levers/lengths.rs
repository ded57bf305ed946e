//! The lengths of the requests that have finished: what is known of one of which nothing else is.

use super::FORGETTING;
use crate::remaining::{LengthDistribution, SurvivalFunction};

/// Bins an octave of length.
const PER_OCTAVE: usize = 8;
const BINS: usize = 17 * PER_OCTAVE;
/// Lengths that have to be known before they are taken for those to come. Fewer know little, and while more are awaited
/// an engine that has just started loses most.
pub const KNOWN_LENGTHS: u32 = 16;

/// The lengths that have finished: what is known of a request of which nothing is known.
#[derive(Clone, Debug)]
pub(super) struct FinishedLengths {
    bins: Vec<f64>,
    count: u32,
    /// Lengths at which the survival function was last made, and how often it was.
    made_at: u32,
    pub(super) version: u32,
    pub(super) survival: Option<SurvivalFunction>,
}

impl Default for FinishedLengths {
    fn default() -> Self {
        Self { bins: vec![0.0; BINS], count: 0, made_at: 0, version: 0, survival: None }
    }
}

impl FinishedLengths {
    pub(super) fn add(&mut self, tokens: u32) {
        let bin = (f64::from(tokens.max(1)).log2() * PER_OCTAVE as f64).ceil() as usize;
        self.bins.iter_mut().for_each(|sum| *sum *= FORGETTING);
        self.bins[bin.min(BINS - 1)] += 1.0;
        self.count = self.count.saturating_add(1);
        // Often enough to follow, seldom enough that those who go by it are not all looked at anew with each.
        if self.count >= KNOWN_LENGTHS && self.count - self.made_at >= (self.count / 16).clamp(1, 64) {
            self.make();
        }
    }

    fn make(&mut self) {
        let seen = || self.bins.iter().enumerate().filter(|&(_, &sum)| sum > 0.0);
        self.survival = Some(SurvivalFunction::new(&LengthDistribution {
            lengths: seen().map(|(bin, _)| (bin as f64 / PER_OCTAVE as f64).exp2()).collect(),
            weights: seen().map(|(_, &sum)| sum).collect(),
        }));
        self.made_at = self.count;
        self.version += 1;
    }
}
