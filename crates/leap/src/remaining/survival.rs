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
    /// Mass above each.
    above: Box<[f32]>,
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
        let mut above: Box<[f32]> = above.collect();
        if let Some(last) = above.last_mut() {
            *last = 0.0;
        }
        Self { lengths: distribution.lengths.iter().map(|&length| length as f32).collect(), above }
    }

    /// Of a length that is known, in tokens.
    pub fn certain(length: u32) -> Self {
        Self::new(&LengthDistribution::point(f64::from(length)))
    }

    /// P(L > t), for ascending `t` in tokens.
    fn walk(&self) -> impl FnMut(f32) -> f32 + '_ {
        let mut next = 0;
        move |t| {
            while next < self.lengths.len() && self.lengths[next] <= t {
                next += 1;
            }
            let before = if next == 0 { 1.0 } else { self.above[next - 1] };
            if next == 0 || next + 1 >= self.lengths.len() {
                return before;
            }
            let (from, to) = (self.lengths[next - 1], self.lengths[next]);
            before + (self.above[next] - before) * (t - from) / (to - from)
        }
    }

    /// P(L > t).
    pub fn at(&self, t: f64) -> f64 {
        f64::from(self.walk()(t as f32))
    }

    /// P(L > a + tau | L > a) into `survive` for each of the ascending `taus`, of a request that stops at `cap` tokens at
    /// the latest. Where nothing is left above `a` it is 0: it ends any moment.
    pub fn ahead(&self, a: u32, cap: u32, taus: &[u32], survive: &mut [f32]) {
        let mut above = self.walk();
        let now = above(a as f32);
        for (&tau, survive) in taus.iter().zip(survive) {
            let t = a.saturating_add(tau);
            *survive = if t >= cap || now <= 0.0 { 0.0 } else { (above(t as f32) / now).min(1.0) };
        }
    }
}
