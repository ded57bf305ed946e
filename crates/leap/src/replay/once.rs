//! One run of a recorded trace at its own times, and nothing else: no capacity is measured and nothing is averaged. What
//! fits an engine's cost to measured times calls this over and over, first come first served.

use super::config::EngineConfig;
use super::input::{RunInput, left_out};
use super::metrics::Goodput;
use super::options::Options;
use super::outcome::{Control, Outcome};
use super::policy::PolicySpec;
use super::ranks::simulate;
use super::readouts::Readouts;
use super::trace::Trace;
use crate::{Error, Result};

/// Simulates every request of a trace under one policy at its recorded arrival. The outcome's records are in order of
/// the rows; with `timeline` it holds what the engine held over time, with `steps` every step. A
/// readout of the policy that is not among `readouts` predicts nothing.
///
/// # Errors
/// [`Error::Trace`] for a trace that cannot be replayed or a request that the engine can never hold, [`Error::Config`]
/// for limits with which nothing could run.
pub fn simulate_recorded(
    trace: &Trace,
    readouts: &Readouts,
    engine: &EngineConfig,
    policy: &str,
    timeline: bool,
    steps: bool,
) -> Result<Outcome> {
    trace.check()?;
    engine.check_for(trace)?;
    if let Some((row, reason)) = left_out(trace, engine).first() {
        return Err(Error::Trace(format!("row {row}: does not fit the engine: {reason}")));
    }
    let options = Options {
        policies: Vec::new(),
        points: Vec::new(),
        burstiness: 1.0,
        num_prompts: None,
        seed: 0,
        seeds: 1,
        max_concurrency: None,
        goodput: Goodput::default(),
        percentiles: Vec::new(),
        max_tokens: None,
        threads: None,
        wait_cap_s: None,
        engine: engine.clone(),
    };
    let spec = policy.parse::<PolicySpec>()?.over(trace)?.on(engine);
    let control = Control { timeline, steps, ..Control::default() };
    simulate(trace, &RunInput::recorded(trace), engine, &spec, readouts, &options, &control)
}
