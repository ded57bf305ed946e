//! What a request will hold of the KV cache, by tokens ahead.

use std::sync::Arc;

use crate::remaining::SurvivalFunction;

/// Tokens ahead at which the memory to come is looked at.
pub const AHEAD: [u32; 20] =
    [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384];
pub(super) const POINTS: usize = AHEAD.len();

/// Sums are kept in whole parts of a block, and of a squared one: what was added is taken off to the last bit, whatever
/// came in between.
const MEAN_UNIT: f32 = (1 << 16) as f32;
const VARIANCE_UNIT: f32 = (1 << 8) as f32;

/// How the KV cache of a request grows: blocks of so many tokens, at most so many blocks, for each group of layers that
/// has a cache of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGrowth {
    /// Blocks a token, and the most blocks.
    groups: Vec<(f32, f32)>,
    /// Tokens after which what is held is looked at anew.
    stride: u32,
}

impl KvGrowth {
    /// One cache for all layers, in blocks of `block_size` tokens.
    pub fn plain(block_size: u32) -> Self {
        Self::of_groups([(block_size, None)])
    }

    /// Groups of layers, each with its block size in tokens and the most blocks that a request ever holds there.
    pub fn of_groups(groups: impl IntoIterator<Item = (u32, Option<u32>)>) -> Self {
        let groups: Vec<(u32, Option<u32>)> = groups.into_iter().collect();
        let group = |&(size, most): &(u32, Option<u32>)| {
            (1.0 / size.max(1) as f32, most.map_or(f32::INFINITY, |most| most as f32))
        };
        Self { groups: groups.iter().map(group).collect(), stride: groups.first().map_or(1, |group| group.0.max(1)) }
    }

    /// Tokens that `blocks` blocks hold, those of all groups together.
    pub(super) fn tokens(&self, blocks: u32) -> f64 {
        f64::from(blocks) * f64::from(self.stride) / self.groups.len().max(1) as f64
    }

    /// Blocks that hold `tokens` tokens, half a block counted for the last one.
    fn blocks(&self, tokens: f32) -> f32 {
        self.groups.iter().map(|&(per_token, most)| (tokens * per_token + 0.5).min(most)).sum()
    }

    /// Where the stride begins that `tokens` tokens lie in: what is made of a request changes only with the stride, and not
    /// with when it was looked at.
    pub(super) fn stride_of(&self, tokens: u32) -> u32 {
        tokens / self.stride * self.stride
    }

    pub(super) fn stride(&self) -> u32 {
        self.stride
    }
}

/// A request as admission sees it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt tokens.
    pub prompt: u32,
    /// Tokens that it stops at, at the latest.
    pub cap: u32,
    /// Blocks of it that others held when it came in: not its own.
    pub shared_blocks: u32,
    /// Its own length, where anything is known of it; else it goes by the lengths that have finished.
    pub length: Option<Arc<SurvivalFunction>>,
}

impl Request {
    /// Blocks that it has to itself once so many tokens of it are stored.
    pub(super) fn held(&self, growth: &KvGrowth, stored: u32) -> f32 {
        (growth.blocks(stored as f32) - self.shared_blocks as f32).max(0.0)
    }
}

/// Blocks by tokens ahead, in whole parts: their mean and their variance, of one request or summed over many.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    mean: [i64; POINTS],
    variance: [i64; POINTS],
}

impl Curve {
    pub(super) const NONE: Self = Self { mean: [0; POINTS], variance: [0; POINTS] };

    /// Of a request with so many tokens made and such a length.
    pub(super) fn of(growth: &KvGrowth, request: &Request, length: &SurvivalFunction, generated: u32) -> Self {
        let mut survive = [0.0f32; POINTS];
        // What it has generated is taken from the start of the stride: a little less than it is costs less than a little more.
        let stride = growth.stride_of(request.prompt.saturating_add(generated));
        length.ahead(stride.saturating_sub(request.prompt), request.cap, &AHEAD, &mut survive);
        let stored = stride + growth.stride / 2;
        let mut curve = Self::NONE;
        for (i, (&s, &ahead)) in survive.iter().zip(&AHEAD).enumerate() {
            if s <= 0.0 {
                break;
            }
            let held = request.held(growth, stored + ahead);
            curve.mean[i] = (s * held * MEAN_UNIT) as i64;
            curve.variance[i] = (s * (1.0 - s) * held * held * VARIANCE_UNIT) as i64;
        }
        curve
    }

    /// Puts `new` in the place of `old` in a sum.
    pub(super) fn exchange(&mut self, old: &Self, new: &Self) {
        for i in 0..POINTS {
            self.mean[i] += new.mean[i] - old.mean[i];
            self.variance[i] += new.variance[i] - old.variance[i];
        }
    }

    /// Whether both together stay within `blocks` at every point, `z` deviations left free.
    pub(super) fn fits(&self, other: &Self, z: f64, blocks: f64) -> bool {
        (0..POINTS).all(|i| {
            let mean = (self.mean[i] + other.mean[i]) as f64 / f64::from(MEAN_UNIT);
            let variance = (self.variance[i] + other.variance[i]) as f64 / f64::from(VARIANCE_UNIT);
            mean + z * variance.sqrt() <= blocks
        })
    }

    /// The most blocks of the mean, and the tokens ahead at which they are held.
    pub(super) fn peak(&self) -> (f64, u32) {
        let peak = self.mean.iter().zip(AHEAD).max_by_key(|(mean, _)| **mean);
        peak.map_or((0.0, 0), |(&mean, ahead)| (mean as f64 / f64::from(MEAN_UNIT), ahead))
    }
}
