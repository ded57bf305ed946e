//! Inter-token latencies of a whole run, pooled over tokens. There are millions of them and most belong to long runs
//! of equal decode steps, so they are kept as exact moments and a histogram of fine logarithmic bins.

use super::cost::Ramp;

/// Width of a bin in natural logarithm: a percentile is exact to 0.2 %.
const BIN: f64 = 0.002;
const SMALLEST_S: f64 = 1e-6;

/// Pooled gaps between consecutive tokens of one request, in seconds.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    bins: Vec<u64>,
    count: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Gaps {
    /// One gap.
    pub fn add(&mut self, seconds: f64) {
        self.put(seconds, 1);
        self.sum += seconds;
        self.sum_of_squares += seconds * seconds;
    }

    /// The gaps of `sequences` sequences over `steps` steps of a ramp.
    pub fn add_ramp(&mut self, ramp: &Ramp, steps: u64, sequences: u64) {
        if sequences == 0 || steps == 0 {
            return;
        }
        let (n, weight) = (steps as f64, sequences as f64);
        let (index, squares) = (n * (n - 1.0) / 2.0, (n - 1.0) * n * (2.0 * n - 1.0) / 6.0);
        self.sum += weight * ramp.elapsed(steps);
        self.sum_of_squares += weight
            * (n * ramp.first * ramp.first
                + 2.0 * ramp.first * ramp.growth * index
                + ramp.growth * ramp.growth * squares);
        let mut done = 0;
        while done < steps {
            let seconds = ramp.first + ramp.growth * done as f64;
            let left = steps - done;
            // Steps until the duration leaves this bin: all of them when the ramp is flat.
            let edge = SMALLEST_S * ((bin_of(seconds) as f64 + 1.0) * BIN).exp();
            let inside = if ramp.growth > 0.0 { ((edge - seconds) / ramp.growth) as u64 + 1 } else { left };
            let run = inside.clamp(1, left);
            self.put(seconds, run * sequences);
            done += run;
        }
    }

    fn put(&mut self, seconds: f64, weight: u64) {
        let bin = bin_of(seconds);
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] += weight;
        self.count += weight;
    }

    /// Number of gaps.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean gap in seconds; `None` when there is none.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// Standard deviation of the population in seconds.
    pub fn std(&self) -> Option<f64> {
        let mean = self.mean()?;
        Some((self.sum_of_squares / self.count as f64 - mean * mean).max(0.0).sqrt())
    }

    /// The `p`-th percentile in seconds, to the middle of its bin.
    pub fn percentile(&self, p: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let rank = (p / 100.0 * (self.count - 1) as f64).round() as u64;
        let mut seen = 0;
        for (bin, &weight) in self.bins.iter().enumerate() {
            seen += weight;
            if seen > rank {
                return Some(SMALLEST_S * ((bin as f64 + 0.5) * BIN).exp());
            }
        }
        None
    }
}

fn bin_of(seconds: f64) -> usize {
    ((seconds / SMALLEST_S).max(1.0).ln() / BIN) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ramp_equals_its_gaps_one_by_one() {
        let ramp = Ramp { first: 0.01, growth: 3e-6 };
        let (mut whole, mut single) = (Gaps::default(), Gaps::default());
        whole.add_ramp(&ramp, 4_000, 3);
        for step in 0..4_000 {
            for _ in 0..3 {
                single.add(ramp.first + ramp.growth * f64::from(step));
            }
        }
        assert_eq!(whole.count(), single.count());
        assert!((whole.mean().unwrap() / single.mean().unwrap() - 1.0).abs() < 1e-12);
        assert!((whole.std().unwrap() / single.std().unwrap() - 1.0).abs() < 1e-6);
        for p in [0.0, 10.0, 50.0, 99.0, 100.0] {
            let exact = ramp.first + ramp.growth * p / 100.0 * 3_999.0;
            assert!((whole.percentile(p).unwrap() / exact - 1.0).abs() < 0.003, "{p}");
        }
    }
}
