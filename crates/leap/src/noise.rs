//! How far true lengths fall from predicted ones, by level of the prediction, learned online: a deviation for each level
//! of the score, the shape of the standardised residuals, and, as labels come in, the lengths themselves that each
//! level led to. All of it works from no data on.

use crate::remaining::LengthDistribution;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::f64::consts::FRAC_1_SQRT_2;
use std::sync::LazyLock;

const LEVELS: usize = 8;
const BINS: usize = 32;
const Z_MAX: f64 = 4.0;
const Z_STEP: f64 = 2.0 * Z_MAX / BINS as f64;

/// Labels that the prior deviation counts for; it is wide, so it must give way soon.
const PRIOR_WEIGHT: f64 = 2.0;
/// Labels that the global deviation counts for in each level.
const LEVEL_WEIGHT: f64 = 16.0;
/// Labels that the normal shape counts for in the histogram.
const SHAPE_WEIGHT: f64 = 64.0;
/// An effective memory of 2,000 labels: long enough for 32 bins, short enough to follow a readout that learns.
const FORGETTING: f64 = 0.9995;
/// Deviations below this (square-root scale) claim more than whole tokens can show.
const SIGMA_FLOOR: f64 = 0.05;
/// Geometric bins of length from 1 to M; behind them one for lengths of M itself, where many answers end.
const LENGTHS: usize = 40;
/// Labels of its level that the residuals' shape counts for against the lengths seen at that level, where the deviation
/// is wide beside the level; more where it is not.
const LOCAL_WEIGHT: f64 = 16.0;
/// Mass that always sits at the cap: an answer may run away whatever was predicted.
const CAP_MASS: f64 = 1e-3;

static NORMAL: LazyLock<[f64; BINS]> = LazyLock::new(|| {
    let below = |z: f64| 0.5 * libm::erfc(-z * FRAC_1_SQRT_2);
    let mut masses = std::array::from_fn(|i| {
        let left = -Z_MAX + i as f64 * Z_STEP;
        below(left + Z_STEP) - below(left)
    });
    let total: f64 = masses.iter().sum();
    masses.iter_mut().for_each(|mass| *mass /= total);
    masses
});

/// Noise of a readout on the square-root scale: y = m + s(m) z with y = sqrt(L).
///
/// s(m)^2 is the decayed mean of e^2 / (1 + leverage) in equal-width levels of m over `[1, sqrt(M)]`, each shrunk to the
/// mean over all levels, which is itself shrunk to a wide prior of sqrt(M) / 4; between the centres of two levels it
/// is interpolated. The shape of z is a histogram over `[-4, 4]` shrunk to the standard normal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct Noise {
    max_tokens: u32,
    forgetting: f64,
    counts: [f64; LEVELS],
    squares: [f64; LEVELS],
    shape: [f64; BINS],
    lengths: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
struct Stored {
    max_tokens: u32,
    forgetting: f64,
    counts: [f64; LEVELS],
    squares: [f64; LEVELS],
    shape: [f64; BINS],
    lengths: Vec<Vec<f64>>,
}

impl TryFrom<Stored> for Noise {
    type Error = Error;

    fn try_from(stored: Stored) -> Result<Self> {
        let Stored { max_tokens, forgetting, counts, squares, shape, lengths } = stored;
        if lengths.len() != LEVELS || lengths.iter().any(|level| level.len() != LENGTHS + 1) {
            return Err(Error::Readout(format!("noise: lengths are not {LEVELS} levels of {} bins", LENGTHS + 1)));
        }
        let sums = counts.iter().chain(&squares).chain(&shape).chain(lengths.iter().flatten());
        if max_tokens == 0 || !(forgetting > 0.0 && forgetting <= 1.0) {
            return Err(Error::Readout(format!(
                "noise: max_tokens {max_tokens} or forgetting {forgetting} out of range"
            )));
        }
        if let Some(bad) = sums.copied().find(|sum| !(sum.is_finite() && *sum >= 0.0)) {
            return Err(Error::Readout(format!("noise: expected sums that are finite and not negative, got {bad}")));
        }
        Ok(Self { max_tokens, forgetting, counts, squares, shape, lengths })
    }
}

impl Noise {
    /// Noise of a readout with output budget `max_tokens` (M), before any label.
    pub fn new(max_tokens: u32) -> Self {
        Self {
            max_tokens: max_tokens.max(1),
            forgetting: FORGETTING,
            counts: [0.0; LEVELS],
            squares: [0.0; LEVELS],
            shape: [0.0; BINS],
            lengths: vec![vec![0.0; LENGTHS + 1]; LEVELS],
        }
    }

    /// The same with each label's weight multiplied by `forgetting` at every later label; 1 keeps plain sums. Values
    /// outside (0, 1] are taken as 1.
    pub fn with_forgetting(mut self, forgetting: f64) -> Self {
        self.forgetting = if forgetting > 0.0 && forgetting < 1.0 { forgetting } else { 1.0 };
        self
    }

    /// Learns from one label. `score` is the prediction m that was made before the label was known, `residual` is
    /// sqrt(L) - m, `leverage` is u'Pu, which inflates its variance to s^2 (1 + u'Pu). Values that are not finite are
    /// passed over, as is a residual too large to square.
    pub fn observe(&mut self, score: f64, residual: f64, leverage: f64) {
        if !score.is_finite() || !residual.is_finite() || leverage.is_nan() {
            return;
        }
        let scaled = residual / (1.0 + leverage.max(0.0)).sqrt();
        let square = scaled * scaled;
        if !square.is_finite() {
            return;
        }
        let z = scaled / self.sigma(score);
        if self.forgetting < 1.0 {
            let sums = self.counts.iter_mut().chain(&mut self.squares).chain(&mut self.shape);
            let sums = sums.chain(self.lengths.iter_mut().flatten());
            sums.for_each(|sum| *sum *= self.forgetting);
        }
        let level = (self.position(score) + 0.5).clamp(0.0, (LEVELS - 1) as f64) as usize;
        self.counts[level] += 1.0;
        self.squares[level] += square;
        let bin = ((z + Z_MAX) / Z_STEP).clamp(0.0, (BINS - 1) as f64) as usize;
        self.shape[bin] += 1.0;
        let length = (score + residual).max(1.0).powi(2);
        let longest = f64::from(self.max_tokens);
        // Rounding of the square root must not move an answer that ended at M.
        let bin = if length > longest - 0.5 { LENGTHS } else { (length.ln() / longest.ln() * LENGTHS as f64) as usize };
        self.lengths[level][bin.min(LENGTHS)] += 1.0;
    }

    /// s(m): deviation of sqrt(L) around `score`, on the square-root scale. Positive and finite.
    pub fn sigma(&self, score: f64) -> f64 {
        let total: f64 = self.counts.iter().sum();
        let square: f64 = self.squares.iter().sum();
        let prior = f64::from(self.max_tokens) / 16.0;
        let global = (PRIOR_WEIGHT * prior + square) / (PRIOR_WEIGHT + total);
        let variance =
            |level: usize| (LEVEL_WEIGHT * global + self.squares[level]) / (LEVEL_WEIGHT + self.counts[level]);
        let (left, share) = self.between(score);
        ((1.0 - share) * variance(left) + share * variance(left + 1)).sqrt().max(SIGMA_FLOOR)
    }

    /// Distribution of the length of a request with this `score` that stops at `cap` tokens, a mixture: lengths
    /// (m + s z)^2 over the histogram of z, and the lengths that scores of this level led to, which weigh in with their
    /// number. Clipped to `[1, cap]`, what lies above the cap is at the cap, and never less than a thousandth of the mass.
    pub fn distribution(&self, score: f64, cap: u32) -> LengthDistribution {
        let total = SHAPE_WEIGHT + self.shape.iter().sum::<f64>();
        let masses: [f64; BINS] = std::array::from_fn(|i| (SHAPE_WEIGHT * NORMAL[i] + self.shape[i]) / total);
        let (left, share) = self.between(score);
        let seen = |bin: usize| (1.0 - share) * self.lengths[left][bin] + share * self.lengths[left + 1][bin];
        let labels: f64 = (0..=LENGTHS).map(seen).sum();
        let sigma = self.sigma(score);
        // A level holds scores over its whole width: where they tell lengths apart more finely than that, what the level
        // led to is blurred, and the residuals about the score itself know better.
        let prior = LOCAL_WEIGHT * (1.0 + (self.width() / sigma).powi(4));
        let unit = 1.0 / (prior + labels);
        let longest = f64::from(self.max_tokens);
        let step = longest.ln() / LENGTHS as f64;
        let local = (0..=LENGTHS).filter(|&bin| seen(bin) > 0.0).map(|bin| {
            // M itself, not what rounding makes of it: Gittins counts what ends at the cap as ended there.
            let length = if bin == LENGTHS { longest } else { ((bin as f64 + 0.5) * step).exp() };
            (length, seen(bin) * unit)
        });
        on_grid(score, sigma, cap, &masses, prior * unit, local)
    }

    /// Where a `length` in tokens lies in the distribution that `score` predicts, lengths from M on at M
    /// ([`LengthDistribution::pit`]).
    pub fn pit(&self, score: f64, length: f64) -> (f64, f64) {
        self.distribution(score, self.max_tokens).pit(length.min(f64::from(self.max_tokens)))
    }

    /// Labels seen, each with what forgetting left of its weight.
    pub fn count(&self) -> f64 {
        self.counts.iter().sum()
    }

    /// The output budget M.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// The two levels about `score`, the left one and the share of the right one.
    fn between(&self, score: f64) -> (usize, f64) {
        let at = self.position(score).clamp(0.0, (LEVELS - 1) as f64);
        let left = (at as usize).min(LEVELS - 2);
        (left, at - left as f64)
    }

    /// Width of a level, on the square-root scale.
    fn width(&self) -> f64 {
        (f64::from(self.max_tokens).sqrt() - 1.0) / LEVELS as f64
    }

    /// Where `score` lies among the centres of the levels: 0 at the first centre, 1 at the second.
    fn position(&self, score: f64) -> f64 {
        let width = self.width();
        if width <= 0.0 || score.is_nan() {
            return 0.0;
        }
        (score - 1.0) / width - 0.5
    }
}

impl LengthDistribution {
    /// Length of a request where sqrt(L) is normal with mean `m` and deviation `s` (square-root scale), on 32 points over
    /// +-4 s, clipped to `[1, cap]` as [`Noise::distribution`] is.
    pub fn normal(m: f64, s: f64, cap: u32) -> Self {
        on_grid(m, s, cap, &NORMAL, 1.0, std::iter::empty())
    }
}

/// Lengths at the centres of the z grid. The grid is scaled so that z has a mean square of exactly 1: the deviation comes
/// from s alone, and a histogram filled while s was still wide cannot narrow it twice.
fn on_grid(
    m: f64,
    s: f64,
    cap: u32,
    masses: &[f64; BINS],
    weight: f64,
    local: impl Iterator<Item = (f64, f64)>,
) -> LengthDistribution {
    let cap = f64::from(cap.max(1));
    let centre = |i: usize| -Z_MAX + (i as f64 + 0.5) * Z_STEP;
    let square: f64 = masses.iter().enumerate().map(|(i, mass)| mass * centre(i) * centre(i)).sum();
    let step = s / square.sqrt();
    let mut lengths: Vec<f64> = Vec::with_capacity(BINS + LENGTHS + 2);
    let mut weights: Vec<f64> = Vec::with_capacity(BINS + LENGTHS + 2);
    let mut add = |(length, mass): (f64, f64)| {
        let length = length.min(cap);
        match weights.last_mut() {
            Some(last) if lengths.last().is_some_and(|&before| length <= before) => *last += mass * (1.0 - CAP_MASS),
            _ => {
                lengths.push(length);
                weights.push(mass * (1.0 - CAP_MASS));
            }
        }
    };
    // Both parts ascend, so that one pass merges them.
    let mut local = local.peekable();
    for (i, &mass) in masses.iter().enumerate() {
        let root = (m + step * centre(i)).max(1.0);
        while let Some(seen) = local.next_if(|seen| seen.0 <= root * root) {
            add(seen);
        }
        add((root * root, mass * weight));
    }
    local.for_each(&mut add);
    match (lengths.last(), weights.last_mut()) {
        (Some(&last), Some(mass)) if last >= cap => *mass += CAP_MASS,
        _ => {
            lengths.push(cap);
            weights.push(CAP_MASS);
        }
    }
    LengthDistribution { lengths, weights }
}
