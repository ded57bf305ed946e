//! Labels of requests that ended at their own limit.

use std::f64::consts::{PI, SQRT_2};

/// phi(z) / (1 - Phi(z)), the hazard of the standard normal (inverse Mills ratio).
fn hazard(z: f64) -> f64 {
    // Past 30 the tail underflows on its way to 0 / 0; the asymptotic series has an error below 1e-8 from there on.
    if z > 30.0 {
        let z2 = z * z;
        return z + 1.0 / z - 2.0 / (z * z2) + 10.0 / (z * z2 * z2);
    }
    (-z * z / 2.0).exp() / (2.0 * PI).sqrt() / (0.5 * libm::erfc(z / SQRT_2))
}

/// `E[y | y > limit]` for y ~ N(`score`, `sigma`^2): the mean of a truncated normal, clipped to `highest`; all on the
/// sqrt-of-tokens scale. It is never below the limit.
pub fn censored_mean(score: f64, sigma: f64, limit: f64, highest: f64) -> f64 {
    let z = (limit - score) / sigma;
    let mean = if z.is_finite() { score + sigma * hazard(z) } else { score };
    mean.max(limit).min(highest)
}
