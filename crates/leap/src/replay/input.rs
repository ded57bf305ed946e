//! What one simulated run is fed: which row of the trace arrives when. The first run of a trace replays it as it was
//! recorded; each further seed deals the requests anew over the same arrival times, or draws arrivals of its own.

use rand::seq::SliceRandom;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Gamma};

use super::engine::EngineConfig;
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
    /// Gaps from a Gamma distribution, as `vllm bench serve` draws them: shape `burstiness` (1 is Poisson).
    Drawn {
        /// Mean requests a second; infinite means all at once.
        request_rate: f64,
        /// Shape of the gaps; below 1 is burstier than Poisson.
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
    /// Run number `index` (0 is the first) of the trace's `rows` (ascending).
    pub fn new(trace: &Trace, rows: &[u32], arrivals: Arrivals, seed: u64, index: u64) -> Result<Self> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(index);
        let mut rows = rows.to_vec();
        let arrival_s = match arrivals {
            Arrivals::Recorded { speed } => {
                let start = rows.first().map_or(0.0, |&row| trace.arrival_s[row as usize]);
                rows.iter().map(|&row| (trace.arrival_s[row as usize] - start) / speed).collect()
            }
            Arrivals::Drawn { request_rate, .. } if request_rate.is_infinite() => vec![0.0; rows.len()],
            Arrivals::Drawn { request_rate, burstiness } => {
                let gaps = Gamma::new(burstiness, 1.0 / (request_rate * burstiness))
                    .map_err(|error| Error::Config(format!("--request-rate and --burstiness: {error}")))?;
                let mut at = 0.0;
                rows.iter()
                    .map(|_| {
                        let now = at;
                        at += gaps.sample(&mut random);
                        now
                    })
                    .collect()
            }
        };
        if index > 0 {
            rows.shuffle(&mut random);
        }
        Ok(Self { round: rows.len().max(1), rows, arrival_s })
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

/// Rows that this engine can never serve, with the reason: the engine would keep them waiting for ever.
pub fn left_out(trace: &Trace, engine: &EngineConfig) -> Vec<(u32, String)> {
    let usable = u64::from(engine.usable_blocks()) * u64::from(engine.block_size);
    let mut out = Vec::new();
    for row in 0..trace.len() {
        let (prompt, output) = (u64::from(trace.prompt_tokens[row]), u64::from(trace.output_tokens[row]));
        // The last token is never read again, so it is not stored.
        let stored = prompt + output - 1;
        if stored > usable {
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
