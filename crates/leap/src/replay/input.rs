//! What one simulated run is fed: which row of the trace arrives when. The first run of a trace replays it as it was
//! recorded; each further seed deals the requests anew over the same arrival times, or draws arrivals of its own.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Gamma};

use super::config::EngineConfig;
use super::trace::Trace;
use crate::{Error, Result};

/// Where the arrival times come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// The trace's own times, divided by `speed`.
    Recorded {
        /// How many times as fast as recorded.
        speed: f64,
    },
    /// As `vllm bench serve` draws them: gaps from a Gamma distribution, the first request's own gap from the start among
    /// them, all scaled so that the last of n requests arrives at n / `request_rate`.
    Drawn {
        /// Requests a second over the whole run; infinite means all at once.
        request_rate: f64,
        /// Shape of the gaps: 1 is Poisson, below it burstier, infinite all equal.
        burstiness: f64,
    },
}

/// One run's requests, in order of arrival.
#[derive(Clone, Debug)]
pub struct RunInput {
    /// Row of the trace of each request.
    pub rows: Vec<u32>,
    /// Planned arrival in seconds.
    pub arrival_s: Vec<f64>,
    /// Requests after which the same rows come again, as other requests with prefixes of their own.
    pub(super) round: usize,
}

impl RunInput {
    /// Run number `index` (0 is the first) of `count` requests: the trace's `rows` (ascending), and where they are
    /// fewer, the same rows over again behind them, dealt anew.
    pub fn new(trace: &Trace, rows: &[u32], count: usize, arrivals: Arrivals, seed: u64, index: u64) -> Result<Self> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(index);
        let round = rows.len().max(1);
        let arrival_s: Vec<f64> = match arrivals {
            Arrivals::Recorded { speed } => {
                let (start, span) = span(trace, rows);
                // A pass starts one mean gap after the last arrival of the pass before it.
                let pass = span + span / (round.max(2) - 1) as f64;
                let at = |i: usize| trace.arrival_s[rows[i % round] as usize] - start + pass * (i / round) as f64;
                (0..count).map(|i| at(i) / speed).collect()
            }
            Arrivals::Drawn { request_rate, burstiness } => drawn(count, request_rate, burstiness, &mut random)?,
        };
        let mut dealt = Vec::with_capacity(count.next_multiple_of(round));
        while dealt.len() < count {
            let pass = dealt.len();
            dealt.extend_from_slice(rows);
            if index > 0 || pass > 0 {
                dealt[pass..].shuffle(&mut random);
            }
        }
        dealt.truncate(count);
        Ok(Self { round, rows: dealt, arrival_s })
    }

    /// Every request of the trace at its recorded time.
    pub fn recorded(trace: &Trace) -> Self {
        Self { round: trace.len().max(1), rows: (0..trace.len() as u32).collect(), arrival_s: trace.arrival_s.clone() }
    }

    /// Everything at once, the whole list `copies` times over: the load that saturates an engine.
    pub fn saturating(rows: &[u32], copies: usize) -> Self {
        let round = rows.len().max(1);
        let rows = rows.repeat(copies);
        Self { round, arrival_s: vec![0.0; rows.len()], rows }
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Arrivals as `vllm bench serve` draws them (`get_request` in its `serve.py`).
fn drawn(count: usize, request_rate: f64, burstiness: f64, random: &mut ChaCha8Rng) -> Result<Vec<f64>> {
    if request_rate.is_infinite() {
        return Ok(vec![0.0; count]);
    }
    // The scaling below undoes whatever mean the gaps have.
    let mut arrival_s: Vec<f64> = if burstiness.is_infinite() {
        vec![1.0; count]
    } else {
        let gaps = Gamma::new(burstiness, 1.0 / burstiness)
            .map_err(|error| Error::Config(format!("--burstiness {burstiness}: {error}")))?;
        gaps.sample_iter(random).take(count).collect()
    };
    let mut sum = 0.0;
    for at in &mut arrival_s {
        sum += *at;
        *at = sum;
    }
    // Of a very small shape every gap may be too small for a number; then all arrive at once, as in vLLM.
    if sum > 0.0 {
        let end_s = count as f64 / request_rate;
        arrival_s.iter_mut().for_each(|at| *at = *at / sum * end_s);
    }
    Ok(arrival_s)
}

/// First arrival of some rows of a trace, and seconds from it to their last.
pub(super) fn span(trace: &Trace, rows: &[u32]) -> (f64, f64) {
    match rows {
        [first, .., last] => {
            let start = trace.arrival_s[*first as usize];
            (start, trace.arrival_s[*last as usize] - start)
        }
        _ => (0.0, 0.0),
    }
}

/// Rows that this engine can never serve, with the reason: it would refuse them, or keep them waiting for ever.
pub fn left_out(trace: &Trace, engine: &EngineConfig) -> Vec<(u32, String)> {
    let usable = u64::from(engine.usable_blocks()) * u64::from(engine.block_size);
    let mut out = Vec::new();
    for row in 0..trace.len() {
        let (prompt, output) = (u64::from(trace.prompt_tokens[row]), u64::from(trace.output_tokens[row]));
        // The last token is never read again, so it is not stored.
        let stored = prompt + output - 1;
        if engine.max_model_len.is_some_and(|most| prompt + output > u64::from(most)) {
            let most = engine.max_model_len.unwrap_or_default();
            out.push((row as u32, format!("has {} tokens with its answer, max_model_len is {most}", prompt + output)));
        } else if stored > usable {
            out.push((row as u32, format!("needs {stored} KV tokens, {usable} are usable")));
        } else if !engine.enable_chunked_prefill && stored > u64::from(engine.max_num_batched_tokens) {
            out.push((
                row as u32,
                format!(
                    "may have to prefill {stored} tokens at once without chunked prefill, max_num_batched_tokens is {}",
                    engine.max_num_batched_tokens
                ),
            ));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arrivals of `count` requests under a seed.
    fn arrivals(count: usize, request_rate: f64, burstiness: f64, seed: u64) -> Vec<f64> {
        let trace = Trace {
            arrival_s: vec![0.0; count],
            prompt_tokens: vec![1; count],
            output_tokens: vec![1; count],
            ..Trace::default()
        };
        let rows: Vec<u32> = (0..count as u32).collect();
        RunInput::new(&trace, &rows, count, Arrivals::Drawn { request_rate, burstiness }, seed, 0).unwrap().arrival_s
    }

    #[test]
    fn the_last_of_n_arrives_at_n_over_the_rate_under_every_seed() {
        for seed in 0..200 {
            for (count, rate, burstiness) in [(1, 4.0, 1.0), (2, 0.3, 5.0), (37, 12.5, 0.5), (500, 3.0, 1.0)] {
                let found = arrivals(count, rate, burstiness, seed);
                assert_eq!(found.len(), count);
                assert_eq!(found.last().copied(), Some(count as f64 / rate));
                assert!(found[0] > 0.0, "the first request has a gap of its own");
                assert!(found.is_sorted());
            }
        }
    }

    #[test]
    fn the_gaps_vary_as_a_gamma_distribution_of_that_shape() {
        let count = 100_000;
        for burstiness in [0.25, 1.0, 9.0] {
            let found = arrivals(count, 8.0, burstiness, 7);
            let starts = std::iter::once(&0.0).chain(&found);
            let gaps: Vec<f64> = starts.zip(&found).map(|(from, to)| to - from).collect();
            let mean = 1.0 / 8.0;
            let moment = |power: i32| gaps.iter().map(|gap| (gap / mean - 1.0).powi(power)).sum::<f64>() / count as f64;
            // In units of the mean, Gamma has the variance 1 / shape and the third central moment 2 / shape^2.
            assert!((moment(2) * burstiness - 1.0).abs() < 0.06, "variance {}", moment(2));
            assert!((moment(3) * burstiness * burstiness / 2.0 - 1.0).abs() < 0.2, "third moment {}", moment(3));
        }
    }

    #[test]
    fn the_first_gap_is_drawn_like_the_others() {
        let runs = 20_000;
        // Of 5 exponential gaps that sum to 1 each is below x with the chance 1 - (1 - x)^4.
        let below = (0..runs).filter(|&seed| arrivals(5, 5.0, 1.0, seed)[0] < 0.2).count();
        let chance = 1.0 - 0.8_f64.powi(4);
        let five_errors = 5.0 * (chance * (1.0 - chance) / runs as f64).sqrt();
        assert!((below as f64 / runs as f64 - chance).abs() < five_errors, "{below} of {runs}");
    }

    #[test]
    fn an_infinite_shape_makes_all_gaps_equal() {
        // Powers of two: no rounding.
        let exact: Vec<f64> = (1..=64).map(|i| f64::from(i) / 4.0).collect();
        assert_eq!(arrivals(64, 4.0, f64::INFINITY, 3), exact);
        for (i, at) in arrivals(1000, 3.0, f64::INFINITY, 3).into_iter().enumerate() {
            let expected = (i + 1) as f64 / 3.0;
            assert!((at / expected - 1.0).abs() < 1e-15, "{at} is not {expected}");
        }
    }

    #[test]
    fn an_infinite_rate_sends_all_at_once_whatever_the_shape() {
        for burstiness in [0.5, 1.0, f64::INFINITY] {
            assert_eq!(arrivals(9, f64::INFINITY, burstiness, 1), [0.0; 9]);
        }
    }

    #[test]
    fn a_shape_that_cannot_be_drawn_from_is_named() {
        let trace = Trace { arrival_s: vec![0.0], ..Trace::default() };
        let drawn = Arrivals::Drawn { request_rate: 1.0, burstiness: -1.0 };
        let error = RunInput::new(&trace, &[0], 1, drawn, 0, 0).unwrap_err();
        assert!(error.to_string().contains("--burstiness -1"), "{error}");
    }
}
