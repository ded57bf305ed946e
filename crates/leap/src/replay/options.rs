//! What a caller asks of a replay, and what cannot be asked.

use serde::{Deserialize, Deserializer};

use super::config::EngineConfig;
use super::metrics::Goodput;
use super::readouts::Readouts;
use super::trace::Trace;
use crate::{Error, Result};

/// One point of a sweep: what differs from the options.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Point {
    /// Offered load as a multiple of the measured FCFS capacity; scales the trace's own times.
    pub load: Option<f64>,
    /// Requests a second that replace the trace's own times; `"inf"` sends all at once.
    #[serde(deserialize_with = "request_rate")]
    pub request_rate: Option<f64>,
    /// Decode slots.
    pub decode_slots: Option<u32>,
    /// Most residents.
    pub max_num_seqs: Option<u32>,
    /// Aging of every policy that ages and was given none, in e-foldings a standing wait.
    pub aging: Option<f64>,
    /// The same in 1/s.
    pub aging_rate: Option<f64>,
}

/// A number that may be infinite, which JSON can only spell as text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Text(String),
}

impl Number {
    fn value<E: serde::de::Error>(self, option: &str) -> std::result::Result<f64, E> {
        match self {
            Self::Finite(value) => Ok(value),
            Self::Text(text) if text == "inf" => Ok(f64::INFINITY),
            Self::Text(text) => Err(E::custom(format!("{option} {text:?} is no number"))),
        }
    }
}

fn request_rate<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<f64>, D::Error> {
    Option::<Number>::deserialize(from)?.map(|rate| rate.value("request_rate")).transpose()
}

fn burstiness<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Number::deserialize(from)?.value("burstiness")
}

/// What to replay, and how.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Specifications of the policies.
    pub policies: Vec<String>,
    /// Points of the sweep; at least one.
    pub points: Vec<Point>,
    /// Shape of drawn gaps between arrivals; `"inf"` makes them all equal.
    #[serde(deserialize_with = "burstiness")]
    pub burstiness: f64,
    /// So many requests: the leading ones, or, beyond the length of the trace, all of them over again.
    pub num_prompts: Option<usize>,
    /// Seed of the first run.
    pub seed: u64,
    /// Runs of every policy at every point.
    pub seeds: u64,
    /// Most requests inside the engine; the client holds others back.
    pub max_concurrency: Option<u32>,
    /// Bounds of a good request.
    #[serde(default)]
    pub goodput: Goodput,
    /// Percentiles to give.
    pub percentiles: Vec<f64>,
    /// Output budget where neither trace nor readout says.
    pub max_tokens: Option<u32>,
    /// Worker threads; absent means all cores.
    pub threads: Option<usize>,
    /// Cap on waiting for every policy that was not given one, in seconds.
    pub wait_cap_s: Option<f64>,
    /// The engine.
    pub engine: EngineConfig,
}

impl Options {
    /// The output budget M in tokens: as given, or the readouts', or the trace's largest limit, or the longest output
    /// rounded up to a power of two.
    pub fn output_budget(&self, trace: &Trace, readouts: &Readouts) -> u32 {
        let limit = trace.max_tokens.as_ref().and_then(|limits| limits.iter().max().copied());
        let longest = || trace.output_tokens.iter().max().copied().unwrap_or(1).next_power_of_two();
        self.max_tokens.or(readouts.max_tokens()).or(limit).unwrap_or_else(longest)
    }

    pub(super) fn check(&self) -> Result<()> {
        self.engine.check()?;
        let refuse = |text: String| Err(Error::Config(text));
        if self.policies.is_empty() || self.points.is_empty() || self.seeds == 0 {
            return refuse("a replay needs at least one policy, one point and one seed".into());
        }
        if self.burstiness.is_nan() || self.burstiness <= 0.0 {
            return refuse(format!("--burstiness must be above 0, got {}", self.burstiness));
        }
        if self.num_prompts == Some(0) {
            return refuse("--num-prompts must be at least 1".into());
        }
        if self.max_concurrency == Some(0) {
            return refuse("--max-concurrency must be at least 1".into());
        }
        if let Some(cap) = self.wait_cap_s.filter(|cap| cap.is_nan() || *cap < 0.0) {
            return refuse(format!("--wait-cap-s must be at least 0, got {cap}"));
        }
        if let Some(p) = self.percentiles.iter().find(|p| !(0.0..=100.0).contains(*p)) {
            return refuse(format!("--metric-percentiles: {p} is not from 0 to 100"));
        }
        for point in &self.points {
            for (option, value) in [("--load", point.load), ("--request-rate", point.request_rate)] {
                if let Some(value) = value.filter(|value| value.is_nan() || *value <= 0.0) {
                    return refuse(format!("{option} must be above 0, got {value}"));
                }
            }
            if point.load.is_some_and(f64::is_infinite) {
                return refuse("--load must be finite".into());
            }
        }
        Ok(())
    }
}
