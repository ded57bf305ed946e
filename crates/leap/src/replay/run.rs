//! Many simulations in parallel: policies, seeds and the points of a sweep. Each is independent and seeded by its own
//! number, so the report is the same whatever the number of threads.

use std::sync::atomic::Ordering;

use rayon::prelude::*;

use super::input::{RunInput, left_out, span};
use super::metrics::{Measure, RunMetrics, quartiles};
use super::options::{Options, Point};
use super::outcome::{Control, Record};
use super::plan::{complete, usable};
use super::policy::{PolicySpec, Rule};
use super::ranks::simulate;
use super::readouts::Readouts;
use super::report::{LeftOut, PolicyReport, Report, TraceReport};
use super::setting::{Setting, setting};
use super::trace::Trace;
use crate::levers::aging::Aging;
use crate::{Error, Result};

/// One finished request of one run, for callers that want them all.
#[derive(Clone, Copy, Debug)]
pub struct RequestRow {
    /// Index of the policy among the report's policies.
    pub policy: u32,
    /// Index of the point.
    pub point: u32,
    /// Seed of the run.
    pub seed: u64,
    /// The request.
    pub record: Record,
}

/// One simulation to do.
struct Task {
    spec: PolicySpec,
    policy: usize,
    point: usize,
    index: u64,
}

/// What every simulation shares.
struct Plan<'a> {
    trace: &'a Trace,
    /// Rows that the engine can serve.
    rows: Vec<u32>,
    /// Requests a run.
    count: usize,
    specs: Vec<PolicySpec>,
    readouts: Readouts,
    settings: Vec<Setting>,
    quartiles: Vec<u32>,
    percentiles: Vec<f64>,
    options: &'a Options,
    want_requests: bool,
    control: &'a Control,
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
    options.check()?;
    let mut notes = Vec::new();
    let specs = usable(trace, readouts, options, &mut notes)?;
    let readouts = complete(readouts, trace, options, &specs, &mut notes)?;
    let head = options.num_prompts.unwrap_or(trace.len()).min(trace.len()) as u32;
    let out: Vec<LeftOut> = left_out(trace, &options.engine)
        .into_iter()
        .filter(|&(row, _)| row < head)
        .map(|(row, reason)| LeftOut { row, reason })
        .collect();
    let mut skip = out.iter().map(|left| left.row).peekable();
    let rows: Vec<u32> = (0..head).filter(|row| skip.next_if_eq(row).is_none()).collect();
    if rows.is_empty() {
        return Err(Error::Trace(format!("no request fits the engine: row {} {}", out[0].row, out[0].reason)));
    }
    let count = requests(trace, &rows, options, &mut notes);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|error| Error::Config(format!("cannot start worker threads: {error}")))?;
    pool.install(|| {
        let settings = options.points.par_iter().map(|point| setting(trace, &rows, options, point, control));
        let mut percentiles = options.percentiles.clone();
        if !percentiles.contains(&99.0) {
            // The change of the tail against fcfs is always given.
            percentiles.push(99.0);
        }
        let plan = Plan {
            settings: settings.collect::<Result<_>>()?,
            quartiles: quartiles(trace, &rows),
            percentiles,
            trace,
            rows,
            count,
            specs,
            readouts,
            options,
            want_requests,
            control,
        };
        plan.run(out, notes)
    })
}

/// Requests a run: those of the rows, or, where more are wanted than the trace has, the same over and over.
fn requests(trace: &Trace, rows: &[u32], options: &Options, notes: &mut Vec<String>) -> usize {
    match options.num_prompts {
        Some(wanted) if wanted > trace.len() => {
            notes.push(format!(
                "the {} requests of the trace are replayed over and over, {wanted} in all; readouts learn from each \
                 once, and keep the prediction that they made of it before",
                trace.len()
            ));
            // What is left out of one pass is left out of each.
            ((wanted as f64 * rows.len() as f64 / trace.len() as f64) as usize).max(1)
        }
        _ => rows.len(),
    }
}

impl Plan<'_> {
    fn run(&self, left_out: Vec<LeftOut>, notes: Vec<String>) -> Result<(Report, Vec<RequestRow>)> {
        let tasks = self.tasks();
        self.control.total.fetch_add((tasks.len() * self.count) as u64, Ordering::Relaxed);
        let one = |task: &Task| {
            let run = self.simulate(task);
            if run.is_err() {
                self.control.cancel.store(true, Ordering::Relaxed);
            }
            run
        };
        let results: Vec<Result<_>> = tasks.par_iter().map(one).collect();
        let (runs, requests): (Vec<RunMetrics>, Vec<Vec<RequestRow>>) =
            results.into_iter().fold(Ok(Vec::new()), first_fault)?.into_iter().unzip();
        Ok((self.report(left_out, notes, &runs), requests.into_iter().flatten().collect()))
    }

    fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        for point in 0..self.settings.len() {
            for (policy, spec) in self.specs.iter().enumerate() {
                let Point { aging, aging_rate, .. } = self.options.points[point];
                let aging = aging.map(Aging::PerWait).or(aging_rate.map(Aging::PerSecond));
                let spec = spec.clone().on(&self.settings[point].config);
                let spec = match aging {
                    Some(aging) => spec.aged(aging),
                    None => spec,
                };
                tasks.extend((0..self.options.seeds).map(|index| Task { spec: spec.clone(), policy, point, index }));
            }
        }
        tasks
    }

    fn simulate(&self, task: &Task) -> Result<(RunMetrics, Vec<RequestRow>)> {
        let setting = &self.settings[task.point];
        let seed = self.options.seed;
        let input = RunInput::new(self.trace, &self.rows, self.count, setting.arrivals, seed, task.index)?;
        let outcome =
            simulate(self.trace, &input, &setting.config, &task.spec, &self.readouts, self.options, self.control)?;
        let measure = Measure {
            trace: self.trace,
            config: &setting.config,
            percentiles: &self.percentiles,
            goodput: self.options.goodput,
            quartiles: &self.quartiles,
        };
        let metrics = measure.of(&task.spec, &outcome);
        let (policy, point, seed) = (task.policy as u32, task.point as u32, seed + task.index);
        let row = |record| RequestRow { policy, point, seed, record };
        let wanted = self.want_requests.then_some(outcome.records);
        Ok((metrics, wanted.into_iter().flatten().map(row).collect()))
    }

    fn report(&self, left_out: Vec<LeftOut>, notes: Vec<String>, runs: &[RunMetrics]) -> Report {
        let seeds = self.options.seeds as usize;
        let chunk = |point: usize, policy: usize| {
            let start = (point * self.specs.len() + policy) * seeds;
            &runs[start..start + seeds]
        };
        let fcfs = self.specs.iter().position(|spec| spec.rule == Rule::Fcfs);
        let mut results = Vec::new();
        for (point, setting) in self.settings.iter().enumerate() {
            let base = fcfs.map(|policy| chunk(point, policy));
            for (policy, spec) in self.specs.iter().enumerate() {
                results.push(PolicyReport {
                    load: setting.request_rate.map(|rate| rate / setting.capacity),
                    request_rate: setting.request_rate,
                    ..PolicyReport::new(spec.name.clone(), point, chunk(point, policy), base)
                });
            }
        }
        Report {
            trace: TraceReport { requests: self.count, duration_s: span(self.trace, &self.rows).1, left_out },
            capacity_rps: self.settings.iter().map(|setting| setting.capacity).collect(),
            policies: self.specs.iter().map(|spec| spec.clone().on(&self.settings[0].config)).collect(),
            notes,
            results,
        }
    }
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
