//! Remaining tokens of many requests at once, with their values checked.

use super::{LengthDistribution, Objective, Order, countdown, gittins_at, survival};
use crate::{Error, Result};

/// Remaining tokens of n requests under `order`.
///
/// `score` (m) and `noise` (s) are on the square-root scale, `generated` (a) and `cap` in tokens. Each has n values, or one
/// that holds for all. [`Order::Countdown`] looks at `score` and `generated` alone; [`Order::Gittins`] takes sqrt(L) as
/// normal on the grid of [`LengthDistribution::normal`] and gives 1 / index for `objective`, and needs a finite cap.
///
/// # Errors
/// [`Error::Config`] where lengths differ or a value cannot be used; it names the first bad one.
pub fn remaining_many(
    order: Order,
    objective: Objective,
    score: &[f64],
    noise: &[f64],
    generated: &[f64],
    cap: &[f64],
) -> Result<Vec<f64>> {
    let inputs = [("score", score), ("noise", noise), ("generated", generated), ("cap", cap)];
    let n = inputs.iter().map(|(_, values)| values.len()).find(|&len| len != 1).unwrap_or(1);
    if let Some((name, values)) = inputs.iter().find(|(_, values)| values.len() != n && values.len() != 1) {
        return Err(Error::Config(format!("{name} has {} values where others have {n}", values.len())));
    }
    let largest = f64::from(u32::MAX);
    check("score", score, "a finite number", f64::is_finite)?;
    check("noise", noise, "a finite number of at least 0", |s| s.is_finite() && s >= 0.0)?;
    check("generated", generated, "a finite number of at least 0", |a| a.is_finite() && a >= 0.0)?;
    if order == Order::Gittins {
        check("cap", cap, "a whole number from 1 to 4294967295", |t| t >= 1.0 && t <= largest && t.fract() == 0.0)?;
    } else {
        check("cap", cap, "a number of at least 1, or infinity", |t| t >= 1.0)?;
    }
    let at = |values: &[f64], i: usize| if values.len() == 1 { values[0] } else { values[i] };
    let one = |i: usize| {
        let (m, s, a, t) = (at(score, i), at(noise, i), at(generated, i), at(cap, i));
        match order {
            Order::Countdown => countdown(m, a),
            Order::Survival => survival(m, s, a, t),
            Order::Gittins => gittins_at(&LengthDistribution::normal(m, s, t as u32), t, objective, a),
        }
    };
    Ok((0..n).map(one).collect())
}

fn check(name: &str, values: &[f64], expected: &str, fits: impl Fn(f64) -> bool) -> Result<()> {
    match values.iter().position(|&value| !fits(value)) {
        Some(i) => Err(Error::Config(format!("{name}[{i}]: expected {expected}, got {}", values[i]))),
        None => Ok(()),
    }
}
