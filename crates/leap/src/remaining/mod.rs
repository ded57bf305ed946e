//! The order of one request. A predicted length and its noise become the number of tokens still to come, as a plain
//! countdown, as the expectation given that the request is still running, or as a Gittins index over the whole
//! distribution of its length.

mod gittins;
mod many;
mod survival;
mod table;

pub use gittins::{GittinsTable, LEVELS, LengthDistribution, gittins_at, level_index, next_level};
pub use many::remaining_many;
pub use survival::SurvivalFunction;
pub use table::RemainingTable;

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::str::FromStr;

/// How a predicted length becomes the remaining tokens that order a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// [`countdown`]: predicted length less what was generated.
    Countdown,
    /// [`survival`]: expected remaining tokens given that the request is still running.
    Survival,
    /// [`GittinsTable`]: one over the Gittins index.
    Gittins,
}

/// What a Gittins order keeps small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Mean per-token latency: a completion weighs 1 / L.
    Ptl,
    /// Mean end-to-end latency: every completion weighs 1.
    E2el,
}

impl FromStr for Order {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "countdown" => Ok(Self::Countdown),
            "survival" => Ok(Self::Survival),
            "gittins" => Ok(Self::Gittins),
            _ => Err(Error::Config(format!("expected countdown, survival or gittins as the order, got {text:?}"))),
        }
    }
}

impl FromStr for Objective {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "ptl" => Ok(Self::Ptl),
            "e2el" => Ok(Self::E2el),
            _ => Err(Error::Config(format!("expected ptl or e2el as the objective, got {text:?}"))),
        }
    }
}

/// Remaining tokens as predicted length less generated tokens, max(m^2 - a, 1): the paper's rule.
///
/// `m` is the score on the square-root scale, `a` the tokens generated so far.
pub fn countdown(m: f64, a: f64) -> f64 {
    (m * m - a).max(1.0)
}

/// Expected remaining tokens E[min(L, cap) - a | L > a] where sqrt(L) is normal with mean `m` and deviation `s`.
///
/// `m` and `s` are on the square-root scale, `a` and `cap` in tokens; `cap` may be infinite. The value lies between 1
/// and max(cap - a, 1) and is finite for any finite input; it is 1 from `a >= cap` on.
///
/// The textbook moments of the truncated normal give G(c) = E[L - c^2 | L > c^2] = m^2 + s^2 - c^2 +
/// s (m + c) phi(z) / Q(z) with z = (c - m) / s. Since m = c - s z this equals s^2 + s (m + c) (1/R(z) - z), R being
/// the Mills ratio Q / phi, and no large numbers cancel for any z. The cap takes off P(L > cap | L > a) G(sqrt(cap)).
pub fn survival(m: f64, s: f64, a: f64, cap: f64) -> f64 {
    let room = (cap - a).max(1.0);
    let a = a.max(0.0);
    if a >= cap {
        return 1.0;
    }
    // Below this the normal is a point for every length a model can write, and (c - m) / s would overflow.
    if s.is_nan() || s < 1e-9 {
        return finite(countdown(m, a).min(room), room);
    }
    let c = a.sqrt();
    let z = (c - m) / s;
    let mut expected = s * s + s * (m + c) * mills_excess(z);
    if cap.is_finite() {
        let t = cap.sqrt();
        let end = (t - m) / s;
        let beyond = tail_ratio(end, z);
        if beyond > 0.0 {
            expected -= beyond * (s * s + s * (m + t) * mills_excess(end));
        }
    }
    finite(expected.min(room), room).max(1.0)
}

/// `value`, or where it is not a number the most that it could be.
fn finite(value: f64, room: f64) -> f64 {
    if value.is_finite() {
        value
    } else if room.is_finite() {
        room
    } else {
        f64::MAX
    }
}

/// Upper tail of the standard normal, 1 - Phi(z).
fn upper(z: f64) -> f64 {
    0.5 * libm::erfc(z * FRAC_1_SQRT_2)
}

/// 1/R(z) - z with the Mills ratio R(z) = (1 - Phi(z)) / phi(z): what is left of the inverse Mills ratio once its
/// asymptote is taken off.
///
/// For z >= 2 by Laplace's continued fraction 1/R(z) = z + 1/(z + 2/(z + 3/(z + ...))) (Abramowitz and Stegun
/// 26.2.14), whose leading z drops out exactly.
fn mills_excess(z: f64) -> f64 {
    if z < 2.0 {
        return (-0.5 * z * z).exp() / (2.0 * PI).sqrt() / upper(z) - z;
    }
    // The truncation error falls as exp(-2 z sqrt(2 n)): this many terms reach double precision.
    let terms = (8.0 + 260.0 / (z * z)) as u32;
    let mut tail = z;
    for k in (2..=terms).rev() {
        tail = z + f64::from(k) / tail;
    }
    1.0 / tail
}

/// Q(end) / Q(z), the probability that a normal variable known to exceed z exceeds `end`, for end >= z.
fn tail_ratio(end: f64, z: f64) -> f64 {
    if z < 2.0 {
        return upper(end) / upper(z);
    }
    (-0.5 * (end - z) * (end + z)).exp() * (z + mills_excess(z)) / (end + mills_excess(end))
}
