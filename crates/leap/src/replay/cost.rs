//! What one engine step costs in seconds: a form with seven coefficients, fitted to real runs and kernel tables. It
//! is linear in the KV tokens read, so that the time of many equal decode steps has a closed form and the replayer
//! can skip over them.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Step-time model of one engine. For a step that decodes `B` sequences which read `K` KV tokens, and prefills `P`
/// tokens with `Q` = sum over chunks of chunk * (cached before + chunk / 2):
///
/// ```text
/// t = step_s + per_decode_seq_s B + (per_kv_token_s + [P > 0] per_kv_token_with_prefill_s) K
///   + per_token_over_free_s max(0, B + P - free_tokens) + per_prefill_pair_s Q
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Seconds of a step that does nothing: weights read, kernels launched.
    pub step_s: f64,
    /// Seconds a decoding sequence.
    pub per_decode_seq_s: f64,
    /// Seconds a KV token read by a decoding sequence.
    pub per_kv_token_s: f64,
    /// Seconds a token of the batch beyond `free_tokens`.
    pub per_token_over_free_s: f64,
    /// Tokens that ride along while the weights are read anyway.
    pub free_tokens: f64,
    /// Seconds a pair of a prefill token and a token before it.
    pub per_prefill_pair_s: f64,
    /// Seconds a KV token read, on top, in a step that also carries prefill.
    pub per_kv_token_with_prefill_s: f64,
}

/// Work of one step, as [`CostModel::step`] takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Sequences that decode.
    pub decode: u32,
    /// KV tokens that they read, summed.
    pub kv_tokens: u64,
    /// Prefill tokens.
    pub prefill: u32,
    /// Pairs of a prefill token and a token before it.
    pub pairs: f64,
}

impl Work {
    /// Adds a prefill chunk of `chunk` tokens behind `before` cached or computed ones.
    pub fn add_chunk(&mut self, chunk: u32, before: u32) {
        self.prefill += chunk;
        self.pairs += f64::from(chunk) * (f64::from(before) + f64::from(chunk) / 2.0);
    }
}

impl CostModel {
    /// Refuses coefficients with which time would not move forward.
    ///
    /// # Errors
    /// [`Error::Config`] names the coefficient.
    pub fn check(&self) -> Result<()> {
        let named = [
            ("step_s", self.step_s),
            ("per_decode_seq_s", self.per_decode_seq_s),
            ("per_kv_token_s", self.per_kv_token_s),
            ("per_token_over_free_s", self.per_token_over_free_s),
            ("free_tokens", self.free_tokens),
            ("per_prefill_pair_s", self.per_prefill_pair_s),
            ("per_kv_token_with_prefill_s", self.per_kv_token_with_prefill_s),
        ];
        if let Some((name, value)) = named.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err(Error::Config(format!("cost model: {name} must be finite and not negative, got {value}")));
        }
        if self.step_s <= 0.0 {
            return Err(Error::Config("cost model: step_s must be above 0".into()));
        }
        Ok(())
    }

    /// Seconds of one step.
    pub fn step(&self, work: &Work) -> f64 {
        let kv =
            if work.prefill > 0 { self.per_kv_token_s + self.per_kv_token_with_prefill_s } else { self.per_kv_token_s };
        let tokens = f64::from(work.decode) + f64::from(work.prefill);
        self.step_s
            + self.per_decode_seq_s * f64::from(work.decode)
            + kv * work.kv_tokens as f64
            + self.per_token_over_free_s * (tokens - self.free_tokens).max(0.0)
            + self.per_prefill_pair_s * work.pairs
    }

    /// Seconds that a request takes alone on an idle engine with a cold cache: prefill in chunks of at most
    /// `max_chunk` tokens, then one decode step for every token after the first.
    pub fn alone_s(&self, prompt_tokens: u32, output_tokens: u32, max_chunk: u32) -> f64 {
        let mut seconds = 0.0;
        let mut computed = 0;
        while computed < prompt_tokens {
            let chunk = (prompt_tokens - computed).min(max_chunk);
            let mut work = Work::default();
            work.add_chunk(chunk, computed);
            seconds += self.step(&work);
            computed += chunk;
        }
        let work = Work { decode: 1, kv_tokens: u64::from(prompt_tokens) + 1, ..Work::default() };
        seconds + Ramp::new(self, &work, 1.0).elapsed(u64::from(output_tokens) - 1)
    }
}

/// Time of consecutive decode steps of one batch: step `i` takes `first + growth * i` seconds, because each sequence
/// reads one KV token more than in the step before.
#[derive(Clone, Copy, Debug)]
pub struct Ramp {
    /// Seconds of the first step.
    pub first: f64,
    /// Seconds that each further step takes more.
    pub growth: f64,
}

impl Ramp {
    /// The ramp that starts with `work`, `slow` times as long as the cost model says.
    pub fn new(cost: &CostModel, work: &Work, slow: f64) -> Self {
        Self { first: cost.step(work) * slow, growth: cost.per_kv_token_s * f64::from(work.decode) * slow }
    }

    /// Seconds of the first `steps` steps.
    pub fn elapsed(&self, steps: u64) -> f64 {
        let n = steps as f64;
        n * self.first + self.growth * n * (n - 1.0) / 2.0
    }

    /// The largest number of steps, at most `limit`, that take less than `seconds`.
    pub fn steps_before(&self, seconds: f64, limit: u64) -> u64 {
        if seconds.is_nan() || seconds <= 0.0 {
            return 0;
        }
        let b = self.first - self.growth / 2.0;
        // Stable root of growth/2 n^2 + b n = seconds; it holds for growth = 0 as well.
        let root = 2.0 * seconds / (b + (b * b + 2.0 * self.growth * seconds).sqrt());
        let mut n = if root >= limit as f64 { limit } else { root as u64 };
        while n > 0 && self.elapsed(n) >= seconds {
            n -= 1;
        }
        while n < limit && self.elapsed(n + 1) < seconds {
            n += 1;
        }
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: CostModel = CostModel {
        step_s: 0.0174,
        per_decode_seq_s: 2.36e-5,
        per_kv_token_s: 1.36e-7,
        per_token_over_free_s: 1.06e-4,
        free_tokens: 57.0,
        per_prefill_pair_s: 2.3e-9,
        per_kv_token_with_prefill_s: 1.12e-7,
    };

    #[test]
    fn published_check_points_of_the_rtx_4090_preset() {
        let ms = |decode, context: u64| {
            1e3 * COST.step(&Work { decode, kv_tokens: u64::from(decode) * context, ..Work::default() })
        };
        assert!((ms(1, 1024) - 17.6).abs() < 0.05);
        assert!((ms(64, 1024) - 28.6).abs() < 0.05);
        assert!((ms(256, 1024) - 80.2).abs() < 0.05);
    }

    #[test]
    fn a_ramp_equals_its_steps_one_by_one() {
        let mut work = Work { decode: 37, kv_tokens: 12_345, ..Work::default() };
        let ramp = Ramp::new(&COST, &work, 1.0);
        let mut sum = 0.0;
        for steps in 1..500_u64 {
            sum += COST.step(&work);
            work.kv_tokens += u64::from(work.decode);
            assert!((ramp.elapsed(steps) - sum).abs() < 1e-12 * sum);
            assert_eq!(ramp.steps_before(sum * (1.0 + 1e-9), 1_000), steps);
            assert_eq!(ramp.steps_before(sum * (1.0 - 1e-9), 1_000), steps - 1);
        }
        assert_eq!(ramp.steps_before(f64::INFINITY, 77), 77);
    }

    #[test]
    fn prefill_makes_the_kv_reads_dearer() {
        let mut work = Work { decode: 32, kv_tokens: 32_768, ..Work::default() };
        let plain = COST.step(&work);
        work.add_chunk(1, 0);
        let expected = 1.12e-7 * 32_768.0 + 2.3e-9 * 0.5;
        assert!((COST.step(&work) - plain - expected).abs() < 1e-12);
    }
}
