//! The engine and the arrivals at one point of a sweep, with the load that they amount to.

use std::sync::atomic::Ordering;

use super::config::EngineConfig;
use super::input::{Arrivals, RunInput, span};
use super::options::{Options, Point};
use super::outcome::Control;
use super::policy::PolicySpec;
use super::ranks::simulate;
use super::readouts::Readouts;
use super::trace::Trace;
use crate::{Error, Result};

/// Requests from which the FCFS capacity is measured at most; of a longer trace, every k-th.
const CAPACITY_ROWS: usize = 20_000;

/// One point of a sweep, worked out.
pub(super) struct Setting {
    pub(super) config: EngineConfig,
    /// Measured FCFS capacity in requests a second.
    pub(super) capacity: f64,
    pub(super) arrivals: Arrivals,
    /// Offered requests a second; none when all come at once.
    pub(super) request_rate: Option<f64>,
}

/// Works a point out; measures the capacity of its engine on the trace.
pub(super) fn setting(
    trace: &Trace,
    rows: &[u32],
    options: &Options,
    point: &Point,
    control: &Control,
) -> Result<Setting> {
    let mut config = options.engine.clone();
    config.decode_slots = point.decode_slots.or(config.decode_slots);
    config.max_num_seqs = point.max_num_seqs.unwrap_or(config.max_num_seqs);
    config.check_for(trace)?;
    let capacity = capacity(trace, rows, &config, options, control)?;
    let (_, duration) = span(trace, rows);
    let own_rate = (duration > 0.0).then(|| rows.len() as f64 / duration);
    let (arrivals, request_rate) = match (point.request_rate, point.load, own_rate) {
        (Some(rate), _, _) => {
            let drawn = Arrivals::Drawn { request_rate: rate, burstiness: options.burstiness };
            (drawn, rate.is_finite().then_some(rate))
        }
        (None, Some(load), Some(own)) => {
            let rate = load * capacity;
            (Arrivals::Recorded { speed: rate / own }, Some(rate))
        }
        (None, Some(_), None) => {
            return Err(Error::Config(
                "--load scales the trace's arrival times, but all its requests arrive at once; use --request-rate"
                    .into(),
            ));
        }
        (None, None, own) => (Arrivals::Recorded { speed: 1.0 }, own),
    };
    Ok(Setting { config, capacity, arrivals, request_rate })
}

/// Requests a second that the engine completes first come first served when this client always has one to send: the
/// whole trace over and over, all at once, its completions counted over the middle half. Where the client allows fewer
/// in flight than the engine seats, that is what the engine can do for it.
fn capacity(trace: &Trace, rows: &[u32], config: &EngineConfig, options: &Options, control: &Control) -> Result<f64> {
    let stride = rows.len().div_ceil(CAPACITY_ROWS);
    let rows: Vec<u32> = rows.iter().step_by(stride).copied().collect();
    let seats = config.max_num_seqs as usize * config.data_parallel_size as usize;
    let inside = options.max_concurrency.map_or(seats, |most| seats.min(most as usize));
    let copies = (8 * inside).div_ceil(rows.len()).max(2);
    let input = RunInput::saturating(&rows, copies);
    let fcfs: PolicySpec = "fcfs".parse()?;
    let untimed = Options { wait_cap_s: None, ..options.clone() };
    control.total.fetch_add(input.len() as u64, Ordering::Relaxed);
    let outcome = simulate(trace, &input, config, &fcfs, &Readouts::default(), &untimed, control)?;
    let mut ends: Vec<f64> = outcome.records.iter().map(|record| record.finish_s).collect();
    ends.sort_by(f64::total_cmp);
    let window = rows.len() * copies / 2;
    let from = (ends.len() - window) / 2;
    let seconds = ends[(from + window).min(ends.len() - 1)] - ends[from];
    Ok(window as f64 / seconds)
}
