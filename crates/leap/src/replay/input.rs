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
            Arrivals::Drawn { request_rate, .. } if request_rate.is_infinite() => vec![0.0; count],
            Arrivals::Drawn { request_rate, burstiness } => {
                let gaps = Gamma::new(burstiness, 1.0 / (request_rate * burstiness))
                    .map_err(|error| Error::Config(format!("--request-rate and --burstiness: {error}")))?;
                let mut at = 0.0;
                (0..count)
                    .map(|_| {
                        let next = at + gaps.sample(&mut random);
                        std::mem::replace(&mut at, next)
                    })
                    .collect()
            }
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
