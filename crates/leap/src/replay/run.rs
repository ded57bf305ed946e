//! Many simulations in parallel: policies, seeds and the points of a sweep. Each is independent and seeded by its own
//! number, so the report is the same whatever the number of threads.

use std::sync::atomic::Ordering;

use rayon::prelude::*;
use serde::{Deserialize, Deserializer};

use super::engine::{Control, EngineConfig, Outcome, simulate};
use super::input::{Arrivals, RunInput, left_out};
use super::metrics::{Goodput, Measure, RunMetrics, quartiles};
use super::policy::{PolicySpec, Rule};
use super::ranker::Readouts;
use super::report::{LeftOut, PolicyReport, Report, TraceReport};
use super::trace::Trace;
use crate::online::{OnlineOptions, OnlineReadout};
use crate::readout::Kind;
use crate::{Error, Result};

/// Requests from which the FCFS capacity is measured at most; of a longer trace, every k-th.
const CAPACITY_ROWS: usize = 20_000;

/// One point of a sweep: what differs from the options.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Point {
    /// Offered load as a multiple of the measured FCFS capacity; scales the trace's own times.
    pub load: Option<f64>,
    /// Requests a second that replace the trace's own times; `"inf"` sends all at once.
    #[serde(deserialize_with = "rate")]
    pub request_rate: Option<f64>,
    /// Decode slots.
    pub decode_slots: Option<u32>,
    /// Most residents.
    pub max_num_seqs: Option<u32>,
    /// Aging of every policy that ages and was not given a rate, in 1/s.
    pub aging_rate: Option<f64>,
}

fn rate<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Rate {
        Number(f64),
        Text(String),
    }
    match Option::<Rate>::deserialize(from)? {
        None => Ok(None),
        Some(Rate::Number(rate)) => Ok(Some(rate)),
        Some(Rate::Text(text)) if text == "inf" => Ok(Some(f64::INFINITY)),
        Some(Rate::Text(text)) => Err(serde::de::Error::custom(format!("request_rate {text:?} is no rate"))),
    }
}

/// What to replay, and how.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Specifications of the policies.
    pub policies: Vec<String>,
    /// Points of the sweep; at least one.
    pub points: Vec<Point>,
    /// Shape of drawn gaps between arrivals.
    pub burstiness: f64,
    /// Only so many leading requests.
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
        let fitted = readouts.state.as_ref().or(readouts.prompt.as_ref()).map(OnlineReadout::max_tokens);
        let limit = trace.max_tokens.as_ref().and_then(|limits| limits.iter().max().copied());
        let longest = || trace.output_tokens.iter().max().copied().unwrap_or(1).next_power_of_two();
        self.max_tokens.or(fitted).or(limit).unwrap_or_else(longest)
    }

    fn check(&self, trace: &Trace) -> Result<()> {
        self.engine.check()?;
        let refuse = |text: String| Err(Error::Config(text));
        if self.policies.is_empty() || self.points.is_empty() || self.seeds == 0 {
            return refuse("a replay needs at least one policy, one point and one seed".into());
        }
        if !self.burstiness.is_finite() || self.burstiness <= 0.0 {
            return refuse(format!("--burstiness must be above 0, got {}", self.burstiness));
        }
        if let Some(rows) = self.num_prompts.filter(|&rows| rows == 0 || rows > trace.len()) {
            return refuse(format!("--num-prompts {rows}: the trace has {} requests", trace.len()));
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

/// One finished request of one run, for callers that want them all.
#[derive(Clone, Copy, Debug)]
pub struct RequestRow {
    /// Index of the policy among the results' policies.
    pub policy: u32,
    /// Index of the point.
    pub point: u32,
    /// Number of the run.
    pub seed: u64,
    /// The request.
    pub record: super::engine::Record,
}

struct Setting {
    config: EngineConfig,
    capacity: f64,
    arrivals: Arrivals,
    request_rate: Option<f64>,
}

struct Task<'a> {
    spec: PolicySpec,
    policy: usize,
    point: usize,
    index: u64,
    setting: &'a Setting,
}

/// Replays a trace.
///
/// # Errors
/// [`Error::Trace`] and [`Error::Config`] for what cannot be replayed, [`Error::Readout`] for readouts that do not fit
/// the trace, [`Error::Cancelled`] when `control` says so.
pub fn run(
    trace: &Trace,
    readouts: &Readouts,
    options: &Options,
    want_requests: bool,
    control: &Control,
) -> Result<(Report, Vec<RequestRow>)> {
    trace.check()?;
    options.check(trace)?;
    let mut notes = Vec::new();
    let readouts = complete(readouts, trace, options, &mut notes)?;
    let specs = usable(trace, &readouts, options, &mut notes)?;
    let head = options.num_prompts.unwrap_or(trace.len()) as u32;
    let out: Vec<LeftOut> = left_out(trace, &options.engine)
        .into_iter()
        .filter(|&(row, _)| row < head)
        .map(|(row, reason)| LeftOut { row, reason })
        .collect();
    let rows: Vec<u32> = {
        let mut skip = out.iter().map(|left| left.row).peekable();
        (0..head).filter(|row| skip.next_if_eq(row).is_none()).collect()
    };
    if rows.is_empty() {
        return Err(Error::Trace(format!("no request fits the engine: row {} {}", out[0].row, out[0].reason)));
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|error| Error::Config(format!("cannot start worker threads: {error}")))?;
    pool.install(|| {
        let settings: Vec<Setting> =
            options.points.par_iter().map(|point| setting(trace, &rows, options, point, control)).collect::<Result<_>>()?;
        let tasks = tasks(&specs, options, &settings);
        control.total.fetch_add((tasks.len() * rows.len()) as u64, Ordering::Relaxed);
        let bounds = quartiles(trace, &rows);
        let runs: Vec<(RunMetrics, Vec<RequestRow>)> = tasks
            .par_iter()
            .map(|task| {
                let run = simulate_task(trace, &rows, &readouts, options, task, &bounds, want_requests, control);
                if run.is_err() {
                    control.cancel.store(true, Ordering::Relaxed);
                }
                run
            })
            .collect::<Vec<Result<_>>>()
            .into_iter()
            .fold(Ok(Vec::new()), first_fault)?;
        Ok(assemble(trace, &rows, out, notes, &specs, options, &settings, runs))
    })
}

/// Collects results; the fault of a task counts before the cancellations that it brought about.
fn first_fault<T>(so_far: Result<Vec<T>>, next: Result<T>) -> Result<Vec<T>> {
    match (so_far, next) {
        (Ok(mut all), Ok(one)) => {
            all.push(one);
            Ok(all)
        }
        (Err(Error::Cancelled) | Ok(_), Err(error)) => Err(error),
        (Err(error), _) => Err(error),
    }
}

/// Readouts that learn from zero where the trace has features and no fitted one was given.
fn complete(readouts: &Readouts, trace: &Trace, options: &Options, notes: &mut Vec<String>) -> Result<Readouts> {
    let mut all = readouts.clone();
    all.state_is_fitted = readouts.state.is_some();
    let budget = options.output_budget(trace, readouts);
    for (column, readout, features) in
        [("features", &readouts.state, &trace.features), ("prompt_features", &readouts.prompt, &trace.prompt_features)]
    {
        let (Some(readout), Some(features)) = (readout, features) else { continue };
        if readout.d() != features.width() {
            return Err(Error::Readout(format!(
                "column {column} has {} features a row, the readout reads {}",
                features.width(),
                readout.d()
            )));
        }
    }
    // A ridge of about twice the number of features keeps few labels from saying much, at any width.
    let zero = |kind: Kind, d: usize| {
        let lam = (2.0 * d as f64).min(1_000.0);
        OnlineReadout::from_zero(d, budget, lam, 256, kind, OnlineOptions::default())
    };
    if trace.prompt_features.is_none() && all.prompt.as_ref().is_some_and(|readout| readout.d() != 3) {
        notes.push("the trace has no prompt_features: the prompt readout given is not used".into());
        all.prompt = None;
    }
    if all.prompt.is_none() {
        let width = trace.prompt_features.as_ref().map_or(3, super::trace::Features::width);
        all.prompt = Some(zero(Kind::Prompt, width)?);
        let what = if trace.prompt_features.is_some() { "prompt features" } else { "prompt length alone" };
        notes.push(format!("leap: the prompt readout learns from zero, on {what}"));
    }
    if let (None, Some(features)) = (&all.state, &trace.features) {
        all.state = Some(zero(Kind::State, features.width())?);
        notes.push("leap: the state readout learns from zero".into());
    }
    Ok(all)
}

/// The policies that can run on this trace; the others are told.
fn usable(
    trace: &Trace,
    readouts: &Readouts,
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<PolicySpec>> {
    let mut specs = Vec::new();
    for text in &options.policies {
        let spec: PolicySpec = text.parse()?;
        if let Rule::Score(name) = &spec.rule {
            if trace.score(name).is_none() {
                return Err(Error::Config(format!("policy {spec}: the trace has no column score_{name}")));
            }
        }
        let paper = matches!(spec.rule, Rule::LeapPaper | Rule::LeapFrozen);
        if paper && trace.features.is_none() {
            notes.push(format!("{spec} is left out: the trace has no column features"));
        } else if spec.rule == Rule::LeapFrozen && !readouts.state_is_fitted {
            notes.push(format!("{spec} is left out: it needs a fitted state readout"));
        } else {
            specs.push(spec);
        }
    }
    if specs.is_empty() {
        return Err(Error::Config(format!("no policy can run: {}", notes.join("; "))));
    }
    Ok(specs)
}

fn setting(trace: &Trace, rows: &[u32], options: &Options, point: &Point, control: &Control) -> Result<Setting> {
    let mut config = options.engine.clone();
    config.decode_slots = point.decode_slots.or(config.decode_slots);
    config.max_num_seqs = point.max_num_seqs.unwrap_or(config.max_num_seqs);
    config.check()?;
    if trace.prefix_blocks.is_some() && trace.prefix_block_size % config.block_size != 0 {
        return Err(Error::Config(format!(
            "block_size {} does not divide the {} tokens of the trace's prefix blocks",
            config.block_size, trace.prefix_block_size
        )));
    }
    let capacity = capacity(trace, rows, &config, options, control)?;
    let duration = match rows {
        [first, .., last] => trace.arrival_s[*last as usize] - trace.arrival_s[*first as usize],
        _ => 0.0,
    };
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
                "--load scales the trace's arrival times, but all its requests arrive at once; use --request-rate".into(),
            ));
        }
        (None, None, own) => (Arrivals::Recorded { speed: 1.0 }, own),
    };
    Ok(Setting { config, capacity, arrivals, request_rate })
}

/// Requests a second that the engine completes first come first served when it is never idle: the whole trace over
/// and over, all at once, its completions counted over the middle half.
fn capacity(
    trace: &Trace,
    rows: &[u32],
    config: &EngineConfig,
    options: &Options,
    control: &Control,
) -> Result<f64> {
    let stride = rows.len().div_ceil(CAPACITY_ROWS);
    let rows: Vec<u32> = rows.iter().step_by(stride).copied().collect();
    let copies = (8 * config.max_num_seqs as usize).div_ceil(rows.len()).max(2);
    let input = RunInput::saturating(&rows, copies);
    let fcfs: PolicySpec = "fcfs".parse()?;
    let unlimited = Options { max_concurrency: None, wait_cap_s: None, ..options.clone() };
    control.total.fetch_add(input.len() as u64, Ordering::Relaxed);
    let outcome = simulate(trace, &input, config, &fcfs, &Readouts::default(), &unlimited, control)?;
    let mut ends: Vec<f64> = outcome.records.iter().map(|record| record.finish_s).collect();
    ends.sort_by(f64::total_cmp);
    let window = rows.len() * copies / 2;
    let from = (ends.len() - window) / 2;
    let seconds = ends[(from + window).min(ends.len() - 1)] - ends[from];
    Ok(window as f64 / seconds)
}

fn tasks<'a>(specs: &[PolicySpec], options: &Options, settings: &'a [Setting]) -> Vec<Task<'a>> {
    let mut tasks = Vec::new();
    for (point, setting) in settings.iter().enumerate() {
        for (policy, spec) in specs.iter().enumerate() {
            let spec = match options.points[point].aging_rate {
                Some(rate) => spec.clone().aged(rate),
                None => spec.clone(),
            };
            for index in 0..options.seeds {
                tasks.push(Task { spec: spec.clone(), policy, point, index, setting });
            }
        }
    }
    tasks
}

#[allow(clippy::too_many_arguments, reason = "one call site; a struct would only rename the arguments")]
fn simulate_task(
    trace: &Trace,
    rows: &[u32],
    readouts: &Readouts,
    options: &Options,
    task: &Task<'_>,
    bounds: &[u32],
    want_requests: bool,
    control: &Control,
) -> Result<(RunMetrics, Vec<RequestRow>)> {
    let config = &task.setting.config;
    let input = RunInput::new(trace, rows, task.setting.arrivals, options.seed, task.index)?;
    let outcome: Outcome = simulate(trace, &input, config, &task.spec, readouts, options, control)?;
    let mut percentiles = options.percentiles.clone();
    if !percentiles.contains(&99.0) {
        percentiles.push(99.0);
    }
    let measure = Measure { trace, config, percentiles: &percentiles, goodput: options.goodput, quartiles: bounds };
    let metrics = measure.of(&task.spec, &outcome);
    let row = |record| RequestRow {
        policy: task.policy as u32,
        point: task.point as u32,
        seed: options.seed + task.index,
        record,
    };
    let records = if want_requests { outcome.records.into_iter().map(row).collect() } else { Vec::new() };
    Ok((metrics, records))
}

#[allow(clippy::too_many_arguments, reason = "one call site; a struct would only rename the arguments")]
fn assemble(
    trace: &Trace,
    rows: &[u32],
    left_out: Vec<LeftOut>,
    notes: Vec<String>,
    specs: &[PolicySpec],
    options: &Options,
    settings: &[Setting],
    runs: Vec<(RunMetrics, Vec<RequestRow>)>,
) -> (Report, Vec<RequestRow>) {
    let (metrics, requests): (Vec<RunMetrics>, Vec<Vec<RequestRow>>) = runs.into_iter().unzip();
    let seeds = options.seeds as usize;
    let chunk = |point: usize, policy: usize| {
        let start = (point * specs.len() + policy) * seeds;
        &metrics[start..start + seeds]
    };
    let fcfs = specs.iter().position(|spec| spec.rule == Rule::Fcfs);
    let mut results = Vec::new();
    for (point, setting) in settings.iter().enumerate() {
        let base = fcfs.map(|policy| chunk(point, policy));
        for (policy, spec) in specs.iter().enumerate() {
            results.push(PolicyReport {
                load: setting.request_rate.map(|rate| rate / setting.capacity),
                request_rate: setting.request_rate,
                ..PolicyReport::new(spec.name.clone(), point, chunk(point, policy), base)
            });
        }
    }
    let span = |rows: &[u32]| match rows {
        [first, .., last] => trace.arrival_s[*last as usize] - trace.arrival_s[*first as usize],
        _ => 0.0,
    };
    let report = Report {
        trace: TraceReport { requests: rows.len(), duration_s: span(rows), left_out },
        capacity_rps: settings.iter().map(|setting| Some(setting.capacity)).collect(),
        notes,
        results,
    };
    (report, requests.into_iter().flatten().collect())
}
