//! Admission control: a waiting request is let in only if, with it, the engine is predicted not to run out of KV blocks
//! while those inside grow. How sure that has to be follows from what it costs to be wrong: the tokens that preempted
//! requests have computed again.
//!
//! For every tau of a grid, with S_i(tau) = P(L_i > a_i + tau | L_i > a_i) over the residents and the candidate and h_i
//! the blocks that only i holds once it is tau tokens further: sum S_i h_i + z sqrt(sum S_i (1 - S_i) h_i^2) must not
//! exceed the usable blocks.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::lengths::FinishedLengths;
pub use super::lengths::KNOWN_LENGTHS;
use super::margin::Margin;
pub use super::margin::RECOMPUTE_SHARE;
use crate::remaining::SurvivalFunction;
use crate::{Error, Result};

/// Tokens ahead at which the memory to come is looked at.
pub const AHEAD: [u32; 20] =
    [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384];
const POINTS: usize = AHEAD.len();

/// Sums are kept in whole parts of a block, and of a squared one: what was added is taken off to the last bit, whatever
/// came in between.
const MEAN_UNIT: f32 = (1 << 16) as f32;
const VARIANCE_UNIT: f32 = (1 << 8) as f32;

/// How the KV cache of a request grows: blocks of so many tokens, at most so many blocks, for each group of layers that
/// has a cache of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGrowth {
    groups: Vec<(u32, f32)>,
}

impl KvGrowth {
    /// One cache for all layers, in blocks of `block_size` tokens.
    pub fn plain(block_size: u32) -> Self {
        Self { groups: vec![(block_size.max(1), f32::INFINITY)] }
    }

    /// Groups of layers, each with its block size in tokens and the most blocks that a request ever holds there.
    pub fn of_groups(groups: impl IntoIterator<Item = (u32, Option<u32>)>) -> Self {
        let group = |(size, most): (u32, Option<u32>)| (size.max(1), most.map_or(f32::INFINITY, |most| most as f32));
        Self { groups: groups.into_iter().map(group).collect() }
    }

    /// Blocks that hold `tokens` tokens, half a block counted for the last one.
    fn blocks(&self, tokens: f32) -> f32 {
        self.groups.iter().map(|&(size, most)| (tokens / size as f32 + 0.5).min(most)).sum()
    }

    /// Tokens after which what is held is looked at anew.
    fn stride(&self) -> u32 {
        self.groups.first().map_or(1, |group| group.0)
    }
}

/// What a request will hold, by tokens ahead.
#[derive(Clone, Debug)]
struct Curve {
    mean: [i64; POINTS],
    variance: [i64; POINTS],
}

impl Curve {
    const NONE: Self = Self { mean: [0; POINTS], variance: [0; POINTS] };
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

#[derive(Clone, Debug)]
struct Resident {
    request: Request,
    generated: u32,
    curve: Curve,
    /// Strides of stored tokens for which the curve was made; `u32::MAX` when it has to be made anew.
    strides: u32,
    /// Which of the finished lengths it was made from.
    version: u32,
    /// Place in the order of admissions.
    place: u64,
}

/// Who is inside, what they are predicted to hold, and how sure an admission has to be.
#[derive(Clone, Debug)]
pub struct Admission {
    growth: KvGrowth,
    usable_blocks: f64,
    residents: FxHashMap<u64, Resident>,
    mean: [i64; POINTS],
    variance: [i64; POINTS],
    finished: FinishedLengths,
    margin: Margin,
    admissions: u64,
    steps: u64,
    holds: u64,
    forecast: Option<Forecast>,
    forecasts: Forecasts,
}

impl Admission {
    /// For an engine with so many usable KV blocks, of whose computed tokens a `recompute_share` may be computed again
    /// because somebody was preempted.
    ///
    /// # Errors
    /// [`Error::Config`] where that share is none: 0, negative, above 1 or not a number.
    pub fn new(growth: KvGrowth, usable_blocks: u32, recompute_share: f64) -> Result<Self> {
        if !(recompute_share > 0.0 && recompute_share <= 1.0) {
            let text = format!("recompute_share: expected a number above 0 and at most 1, got {recompute_share}");
            return Err(Error::Config(text));
        }
        let tokens = f64::from(usable_blocks) * f64::from(growth.stride()) / growth.groups.len().max(1) as f64;
        Ok(Self {
            growth,
            usable_blocks: f64::from(usable_blocks),
            residents: FxHashMap::default(),
            mean: [0; POINTS],
            variance: [0; POINTS],
            finished: FinishedLengths::default(),
            margin: Margin::new(tokens, recompute_share),
            admissions: 0,
            steps: 0,
            holds: 0,
            forecast: None,
            forecasts: Forecasts::default(),
        })
    }

    /// A request has been admitted.
    pub fn admitted(&mut self, id: u64, request: Request) {
        self.left(id);
        self.admissions += 1;
        let place = self.admissions;
        let resident = Resident { request, generated: 0, curve: Curve::NONE, strides: u32::MAX, version: 0, place };
        self.residents.insert(id, resident);
    }

    /// A resident has lost its blocks for want of memory.
    pub fn preempted(&mut self, id: u64) {
        self.left(id);
        if let Some(forecast) = self.forecast.take() {
            // Whatever those inside would have come to hold, it is more than there is.
            self.forecasts.add(forecast.blocks, self.usable_blocks);
        }
    }

    /// A resident has ended, or given its blocks to somebody better.
    pub fn left(&mut self, id: u64) {
        if let Some(resident) = self.residents.remove(&id) {
            shift(&mut self.mean, &resident.curve.mean, -1);
            shift(&mut self.variance, &resident.curve.variance, -1);
        }
    }

    /// More is known of a resident's length, or less.
    pub fn learned(&mut self, id: u64, length: Option<Arc<SurvivalFunction>>) {
        if let Some(resident) = self.residents.get_mut(&id) {
            resident.request.length = length;
            resident.strides = u32::MAX;
        }
    }

    /// A request has finished with so many tokens, by itself or at its limit: both say how long requests stay.
    pub fn finished(&mut self, tokens: u32) {
        self.finished.add(tokens);
    }

    /// A resident has generated so many tokens by now.
    pub fn progressed(&mut self, id: u64, generated: u32) {
        let Some(resident) = self.residents.get_mut(&id) else { return };
        resident.generated = generated;
        let strides = (resident.request.prompt + generated) / self.growth.stride();
        let version = if resident.request.length.is_some() { 0 } else { self.finished.version };
        if resident.strides == strides && resident.version == version {
            return;
        }
        let made = curve(&self.growth, &self.finished, &resident.request, generated);
        resident.strides = if made.is_some() { strides } else { u32::MAX };
        resident.version = version;
        let made = made.unwrap_or(Curve::NONE);
        let before = std::mem::replace(&mut resident.curve, made);
        for (sum, (new, old)) in self.mean.iter_mut().zip(resident.curve.mean.iter().zip(&before.mean)) {
            *sum += new - old;
        }
        for (sum, (new, old)) in self.variance.iter_mut().zip(resident.curve.variance.iter().zip(&before.variance)) {
            *sum += new - old;
        }
    }

    /// Whether a request that has generated so many tokens may come in. All residents have been brought up to date with
    /// [`progressed`](Self::progressed). Yes where nobody is inside, and where a length is not known yet.
    pub fn has_room(&mut self, candidate: &Request, generated: u32) -> bool {
        self.look_back();
        if self.residents.is_empty() {
            return true;
        }
        if self.finished.survival.is_none() && self.residents.values().any(|r| r.request.length.is_none()) {
            return true;
        }
        let Some(curve) = curve(&self.growth, &self.finished, candidate, generated) else { return true };
        let z = self.margin.z();
        (0..POINTS).all(|i| {
            let mean = (self.mean[i] + curve.mean[i]) as f64 / f64::from(MEAN_UNIT);
            let variance = (self.variance[i] + curve.variance[i]) as f64 / f64::from(VARIANCE_UNIT);
            mean + z * variance.sqrt() <= self.usable_blocks
        })
    }

    /// The first of the queue was held back in a step.
    pub fn held(&mut self) {
        self.holds += 1;
    }

    /// So many equal steps have been composed, each of `computed` tokens; `recomputed` of those of the first had been
    /// computed before.
    pub fn stepped(&mut self, computed: u64, recomputed: u64, steps: u64) {
        self.steps += steps;
        self.margin.step(computed, recomputed, steps);
    }

    /// Steps in which the first of the queue was held back.
    pub fn holds(&self) -> u64 {
        self.holds
    }

    /// Standard deviations that have to be left free.
    pub fn z(&self) -> f64 {
        self.margin.z()
    }

    /// What residents came to hold over what had been predicted, at the tokens ahead at which that was most; none before
    /// the first such look back.
    pub fn peak_ratio(&self) -> Option<f64> {
        (self.forecasts.predicted > 0.0).then(|| self.forecasts.held / self.forecasts.predicted)
    }

    /// Compares an earlier prediction with what those who were inside then hold now, and makes the next.
    fn look_back(&mut self) {
        if let Some(forecast) = self.forecast.take_if(|forecast| forecast.due <= self.steps) {
            // Nobody looked while the queue was empty: what is held now is something else.
            if self.steps - forecast.due < u64::from(AHEAD[0]) {
                let held: f32 = self
                    .residents
                    .values()
                    .filter(|resident| resident.place <= forecast.place)
                    .map(|resident| held(&self.growth, &resident.request, resident.request.prompt + resident.generated))
                    .sum();
                self.forecasts.add(forecast.blocks, f64::from(held));
            }
        }
        if self.forecast.is_none()
            && let Some((at, &peak)) = self.mean.iter().enumerate().max_by_key(|&(_, mean)| *mean)
            && peak > 0
        {
            let blocks = peak as f64 / f64::from(MEAN_UNIT);
            let due = self.steps + u64::from(AHEAD[at]);
            self.forecast = Some(Forecast { blocks, due, place: self.admissions });
        }
    }
}

/// A predicted peak: so many blocks in the step `due`, of those who were admitted up to `place`.
#[derive(Clone, Copy, Debug)]
struct Forecast {
    blocks: f64,
    due: u64,
    place: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Forecasts {
    predicted: f64,
    held: f64,
}

impl Forecasts {
    fn add(&mut self, predicted: f64, held: f64) {
        self.predicted += predicted;
        self.held += held;
    }
}

fn shift(sums: &mut [i64; POINTS], by: &[i64; POINTS], sign: i64) {
    sums.iter_mut().zip(by).for_each(|(sum, by)| *sum += sign * by);
}

/// What a request will hold; none where nothing is known of its length.
fn curve(growth: &KvGrowth, finished: &FinishedLengths, request: &Request, generated: u32) -> Option<Curve> {
    let length = request.length.as_deref().or(finished.survival.as_ref())?;
    let mut survive = [0.0f32; POINTS];
    let stored = in_stride(growth, request, generated);
    length.ahead(stored.saturating_sub(request.prompt), request.cap, &AHEAD, &mut survive);
    let mut curve = Curve::NONE;
    for i in 0..POINTS {
        let s = survive[i];
        if s <= 0.0 {
            break;
        }
        let held = held(growth, request, stored + AHEAD[i]);
        curve.mean[i] = (s * held * MEAN_UNIT) as i64;
        curve.variance[i] = (s * (1.0 - s) * held * held * VARIANCE_UNIT) as i64;
    }
    Some(curve)
}

/// Tokens in the KV cache of a request, as the middle of the stride that they lie in: so what is made of them changes only
/// with the stride, and not with when it was looked at.
fn in_stride(growth: &KvGrowth, request: &Request, generated: u32) -> u32 {
    let stride = growth.stride();
    request.prompt.saturating_add(generated) / stride * stride + stride / 2
}

/// Blocks that a request has to itself once so many tokens of it are stored.
fn held(growth: &KvGrowth, request: &Request, stored: u32) -> f32 {
    (growth.blocks(stored as f32) - request.shared_blocks as f32).max(0.0)
}
