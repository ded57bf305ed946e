//! The survival function of one request's output length: what is asked when its KV cache is looked ahead at.

use super::LengthDistribution;

/// P(L > t) of an output length L in tokens.
///
/// Made of a discrete distribution, whose points stand for the lengths about them: the mass of each but the first and the
/// last is spread evenly down to the point before it. So a length known for certain stays a step, and so does what ends
/// at the cap.
#[derive(Clone, Debug, PartialEq)]
pub struct SurvivalFunction {
    /// Lengths in tokens, ascending.
    lengths: Box<[f32]>,
    /// Mass above each, and how much of it goes with every token beyond.
    above: Box<[(f32, f32)]>,
}

impl SurvivalFunction {
    /// Of a distribution; one without a point survives nothing.
    pub fn new(distribution: &LengthDistribution) -> Self {
        let total: f64 = distribution.weights.iter().sum();
        let mut left = total;
        let above = distribution.weights.iter().map(|weight| {
            left -= weight;
            if total > 0.0 { (left / total).max(0.0) as f32 } else { 0.0 }
        });
        let mut above: Vec<f32> = above.collect();
        if let Some(last) = above.last_mut() {
            *last = 0.0;
        }
        let lengths: Box<[f32]> = distribution.lengths.iter().map(|&length| length as f32).collect();
        let slope = |i: usize| {
            // What stands at the last point ends there at once.
            let spread = i + 2 < lengths.len() && lengths[i + 1] > lengths[i];
            if spread { (above[i + 1] - above[i]) / (lengths[i + 1] - lengths[i]) } else { 0.0 }
        };
        let above = (0..lengths.len()).map(|i| (above[i], slope(i))).collect();
        Self { lengths, above }
    }

    /// Of a length that is known, in tokens.
    pub fn certain(length: u32) -> Self {
        Self::new(&LengthDistribution::point(f64::from(length)))
    }

    /// P(L > t) for a `t` in tokens, `next` being the first point above it.
    fn between(&self, t: f32, next: usize) -> f32 {
        let Some(before) = next.checked_sub(1) else { return 1.0 };
        let (above, slope) = self.above[before];
        above + slope * (t - self.lengths[before])
    }

    fn next(&self, t: f32) -> usize {
        self.lengths.partition_point(|&length| length <= t)
    }

    /// P(L > t).
    pub fn at(&self, t: f64) -> f64 {
        f64::from(self.between(t as f32, self.next(t as f32)))
    }

    /// P(L > a + tau | L > a) into `survive` for each of the ascending `taus`, of a request that stops at `cap` tokens at
    /// the latest. Where nothing is left above `a` it is 0: it ends any moment.
    pub fn ahead(&self, a: u32, cap: u32, taus: &[u32], survive: &mut [f32]) {
        let mut next = self.next(a as f32);
        let now = self.between(a as f32, next);
        let scale = if now > 0.0 { 1.0 / now } else { 0.0 };
        for (&tau, survive) in taus.iter().zip(survive) {
            let t = a.saturating_add(tau);
            if t >= cap || scale == 0.0 {
                *survive = 0.0;
                continue;
            }
            while self.lengths.get(next).is_some_and(|&length| length <= t as f32) {
                next += 1;
            }
            *survive = (self.between(t as f32, next) * scale).clamp(0.0, 1.0);
        }
    }
}
