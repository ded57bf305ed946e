//! Gittins order of one request: a table of remaining = 1 / index over shared levels of generated tokens, made once
//! when the score arrives.

use super::Objective;

const LEVEL_COUNT: usize = 58;

/// Generated-token levels at which requests are re-keyed: 0, then 8 * sqrt(2)^i rounded (8, 11, 16, 23, 32, 45, ...).
pub const LEVELS: [u32; LEVEL_COUNT] = levels();

const fn levels() -> [u32; LEVEL_COUNT] {
    let mut out = [0u32; LEVEL_COUNT];
    let mut i = 1;
    while i < LEVEL_COUNT {
        let doublings = ((i - 1) / 2) as u32;
        out[i] = if i % 2 == 1 {
            8 << doublings
        } else {
            ((1u64 << doublings) as f64 * 8.0 * std::f64::consts::SQRT_2 + 0.5) as u32
        };
        i += 1;
    }
    out
}

/// Index in [`LEVELS`] of the greatest level that is at most `a`.
pub fn level_index(a: u32) -> usize {
    if a < 8 {
        return 0;
    }
    let even = 1 + 2 * (a.ilog2() as usize - 3);
    match LEVELS.get(even + 1) {
        Some(&half_octave) if a >= half_octave => even + 1,
        _ => even,
    }
}

/// Smallest level above `a`: a request whose tokens reach it is given a new key. `u32::MAX` above the last level.
pub fn next_level(a: u32) -> u32 {
    LEVELS.get(level_index(a) + 1).copied().unwrap_or(u32::MAX)
}

/// A discrete distribution of a request's output length.
#[derive(Clone, Debug, PartialEq)]
pub struct LengthDistribution {
    /// Support in tokens: strictly ascending, each at least 1 and at most the cap.
    pub lengths: Vec<f64>,
    /// Probability of each length; they sum to 1.
    pub weights: Vec<f64>,
}

impl LengthDistribution {
    /// A length known for certain, in tokens.
    pub fn point(length: f64) -> Self {
        Self { lengths: vec![length.max(1.0)], weights: vec![1.0] }
    }

    /// Probability integral transform of a `length`: the mass below it and the mass up to it. The two differ where it is
    /// one of the points, as answers that end at the cap are.
    pub fn pit(&self, length: f64) -> (f64, f64) {
        let mass = |end: usize| self.weights[..end].iter().sum::<f64>().min(1.0);
        (mass(self.lengths.partition_point(|&l| l < length)), mass(self.lengths.partition_point(|&l| l <= length)))
    }

    /// Expected length in tokens.
    pub fn mean(&self) -> f64 {
        self.lengths.iter().zip(&self.weights).map(|(l, w)| l * w).sum()
    }
}

/// Gittins order of one request over the shared [`LEVELS`] below its cap.
///
/// index(a) = max over D > 0 of E[w(L) 1(L <= a + D) | L > a] / E[min(L - a, D) | L > a], with w = 1 for
/// [`Objective::E2el`] and 1 / L for [`Objective::Ptl`]; a completion at the cap is a completion. (Gittins, Glazebrook
/// and Weber, "Multi-armed Bandit Allocation Indices", 2011; Aalto, Ayesta and Righter, "On the Gittins index in the
/// M/G/1 queue", 2009.) 8 bytes a level: about 180 in all for a cap of 16,384.
#[derive(Clone, Debug)]
pub struct GittinsTable {
    cap: u32,
    /// 1 / index and E[L - a | L > a] in turn, a pair a level.
    pairs: Box<[f32]>,
}

impl GittinsTable {
    /// Table for a request whose length follows `distribution` and which stops at `cap` tokens at the latest; mass above
    /// the cap counts at the cap. Time is linear in levels plus support.
    pub fn new(distribution: &LengthDistribution, cap: u32, objective: Objective) -> Self {
        let cap = cap.max(1);
        let count = level_index(cap - 1) + 1;
        let mut pairs = vec![0.0f32; 2 * count].into_boxed_slice();
        let mut slots = pairs.chunks_exact_mut(2).rev();
        let levels = LEVELS[..count].iter().rev().map(|&level| f64::from(level));
        descend(distribution, f64::from(cap), objective, levels, |value| {
            if let Some(slot) = slots.next() {
                slot[0] = value.remaining as f32;
                slot[1] = value.mean_remaining as f32;
            }
        });
        Self { cap, pairs }
    }

    /// 1 / index at the greatest level that is at most `a`: tokens under [`Objective::E2el`], tokens squared under
    /// [`Objective::Ptl`]; at least 1, always finite, 1 from the cap on.
    pub fn remaining(&self, a: u32) -> f64 {
        self.pair(a).map_or(1.0, |pair| f64::from(pair[0]))
    }

    /// Expected remaining tokens E[L - a | L > a] at the greatest level that is at most `a`; at least 1.
    pub fn mean_remaining(&self, a: u32) -> f64 {
        self.pair(a).map_or(1.0, |pair| f64::from(pair[1]))
    }

    /// Tokens at which the request stops at the latest.
    pub fn cap(&self) -> u32 {
        self.cap
    }

    fn pair(&self, a: u32) -> Option<&[f32]> {
        if a >= self.cap {
            return None;
        }
        let at = 2 * level_index(a);
        self.pairs.get(at..at + 2)
    }
}

/// 1 / index at any `a`, not only at a level: what [`GittinsTable::remaining`] holds at its levels.
pub fn gittins_at(distribution: &LengthDistribution, cap: f64, objective: Objective, a: f64) -> f64 {
    let mut remaining = 1.0;
    if a < cap {
        descend(distribution, cap, objective, std::iter::once(a.max(0.0)), |value| remaining = value.remaining);
    }
    remaining
}

struct Value {
    remaining: f64,
    mean_remaining: f64,
}

/// Walks support and levels from the cap downwards and emits a value for each level, in the order given (descending,
/// all below the cap).
///
/// With J(x) the integral of P(L > t) from x to the cap and N(x) = E[w(L) 1(L > x)], the index at a is the steepest
/// slope (N(a) - N(x)) / (J(a) - J(x)) over x > a. That is the first edge of the upper hull of the points to the right,
/// so one stack serves all levels; suffix sums keep the far tail accurate.
fn descend(
    distribution: &LengthDistribution,
    cap: f64,
    objective: Objective,
    levels: impl Iterator<Item = f64>,
    mut emit: impl FnMut(Value),
) {
    let value_of = |length: f64| match objective {
        Objective::E2el => 1.0,
        Objective::Ptl => 1.0 / length.max(1.0),
    };
    let mut levels = levels.peekable();
    let mut hull: Vec<(f64, f64)> = Vec::with_capacity(distribution.lengths.len() + 28);
    hull.push((0.0, 0.0));
    let (mut at, mut mass, mut j, mut n) = (cap, 0.0, 0.0, 0.0);
    let support = distribution.lengths.iter().zip(&distribution.weights).rev().map(|(&l, &w)| (l.min(cap), w));
    for (x, weight) in support.chain(std::iter::once((f64::NEG_INFINITY, 0.0))) {
        while let Some(a) = levels.next_if(|&a| a >= x) {
            let point = (j + mass * (at - a), n);
            // Past all the support the request is known to run to its cap.
            let mut value = Value { remaining: (cap - a) / value_of(cap), mean_remaining: cap - a };
            if mass > 0.0
                && let Some((run, rise)) = push(&mut hull, point)
            {
                let inverse = run / rise;
                let mean = point.0 / mass;
                if inverse.is_finite() && mean.is_finite() {
                    value = Value { remaining: inverse, mean_remaining: mean };
                }
            }
            value.remaining = value.remaining.max(1.0);
            value.mean_remaining = value.mean_remaining.max(1.0);
            emit(value);
        }
        if x == f64::NEG_INFINITY {
            break;
        }
        if x < at {
            j += mass * (at - x);
            push(&mut hull, (j, n));
            at = x;
        }
        mass += weight;
        n += weight * value_of(x);
    }
}

/// Adds a point left of all others to the hull and returns run and rise of its first edge; none where it equals the
/// point before it.
fn push(hull: &mut Vec<(f64, f64)>, point: (f64, f64)) -> Option<(f64, f64)> {
    while let [.., second, top] = hull[..] {
        let steeper_skips_top = (point.1 - top.1) * (top.0 - second.0) <= (top.1 - second.1) * (point.0 - top.0);
        if !steeper_skips_top {
            break;
        }
        hull.pop();
    }
    let top = *hull.last()?;
    let edge = (point.0 - top.0, point.1 - top.1);
    if edge.0 <= 0.0 {
        return None;
    }
    hull.push(point);
    Some(edge)
}
