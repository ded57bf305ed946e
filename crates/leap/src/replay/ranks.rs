//! The ranks of a data-parallel deployment in lock-step, and the client in front of them. Where experts are spread over
//! the ranks, no rank leaves a layer before the others reach it: all compose at the same moments, and each step takes as
//! long as that of the slowest. A single engine is one rank.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use super::balancer::{Balancer, Counts};
use super::client::Client;
use super::config::EngineConfig;
use super::cost::Ramp;
use super::engine::{Engine, Span};
use super::input::RunInput;
use super::options::Options;
use super::outcome::{Control, Outcome, Record};
use super::policy::PolicySpec;
use super::ranker::Ranker;
use super::readouts::{Predicted, Readouts};
use super::state::Step;
use super::timeline::Timeline;
use super::trace::Trace;
use crate::levers::admission::Admission;
use crate::{Error, Result};

/// Simulates one policy once.
///
/// # Errors
/// [`Error::Config`] for options that do not fit the trace, [`Error::Readout`] for features that do not fit a readout,
/// [`Error::Cancelled`] when `control` says so.
pub fn simulate(
    trace: &Trace,
    input: &RunInput,
    config: &EngineConfig,
    spec: &PolicySpec,
    readouts: &Readouts,
    options: &Options,
    control: &Control,
) -> Result<Outcome> {
    let predicted = Rc::new(Predicted::new(spec, trace, input, readouts)?);
    let budget = options.output_budget(trace, readouts);
    let engine = |_| {
        let ranker = Ranker::new(spec, trace, input, readouts, Rc::clone(&predicted), budget)?;
        Engine::new(trace, input, config, spec, ranker, options, control)
    };
    let engines: Vec<Engine> = (0..config.data_parallel_size).map(engine).collect::<Result<_>>()?;
    let ranks = Ranks {
        client: Client::new(input, options.max_concurrency),
        balancer: Balancer::new(engines.len()),
        rank: vec![0; input.len()],
        steps: Vec::with_capacity(engines.len()),
        engines,
        now: 0.0,
        horizon: 0.0,
        control,
        outcome: Outcome::default(),
    };
    ranks.run()
}

struct Ranks<'a> {
    engines: Vec<Engine<'a>>,
    client: Client<'a>,
    balancer: Balancer,
    /// Rank of each request that has been sent.
    rank: Vec<u32>,
    /// What each rank does in the step that is being composed.
    steps: Vec<Option<Step>>,
    now: f64,
    /// End of the last composed step.
    horizon: f64,
    control: &'a Control,
    outcome: Outcome,
}

impl Ranks<'_> {
    fn run(mut self) -> Result<Outcome> {
        loop {
            if self.control.cancel.load(Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
            self.take_in()?;
            if self.land()? {
                self.take_in()?;
            }
            if self.compose() {
                self.execute();
                continue;
            }
            let landing = self.engines.iter().filter_map(Engine::next_landing).min_by(f64::total_cmp);
            let Some(next) = landing.or_else(|| self.next_event()) else { break };
            self.now = self.now.max(next);
        }
        let waiting: usize = self.engines.iter().map(|engine| engine.waiting.len()).sum();
        let resident: usize = self.engines.iter().map(|engine| engine.seats.residents.len()).sum();
        if waiting > 0 || resident > 0 || !self.client.has_sent_all() {
            return Err(Error::Config(format!(
                "policy {}: the engine stands still at {:.3} s with {waiting} waiting and {resident} resident",
                self.engines[0].spec, self.now,
            )));
        }
        Ok(self.close())
    }

    /// Lets in what has arrived by now, and the predictions that have come by now.
    fn take_in(&mut self) -> Result<()> {
        while let Some((id, at)) = self.client.send(self.now) {
            let rank = if self.engines.len() == 1 { 0 } else { self.balancer.choose(at) };
            self.rank[id as usize] = rank as u32;
            self.engines[rank].arrive(id, at)?;
        }
        for engine in &mut self.engines {
            engine.now = self.now;
            engine.take_predictions()?;
        }
        Ok(())
    }

    /// Processes the steps that have ended by now.
    fn land(&mut self) -> Result<bool> {
        let mut released = false;
        for engine in &mut self.engines {
            released |= engine.land(&mut self.client)?;
        }
        Ok(released)
    }

    /// Composes the next step of every rank; says whether any has something to do.
    fn compose(&mut self) -> bool {
        self.steps.clear();
        self.steps.extend(self.engines.iter_mut().map(Engine::compose_now));
        if self.engines.len() > 1 {
            let counts = self.engines.iter().map(|engine| Counts {
                waiting: engine.waiting.len() as u32,
                running: engine.seats.residents.len() as u32,
            });
            self.balancer.report(self.now, counts);
        }
        self.steps.iter().any(Option::is_some)
    }

    /// The next moment at which something comes from outside.
    fn next_event(&self) -> Option<f64> {
        let predicted = self.engines.iter().filter_map(Engine::next_prediction);
        predicted.chain(self.client.next_arrival()).min_by(f64::total_cmp)
    }

    /// Runs the composed step and the equal ones behind it.
    fn execute(&mut self) {
        let start = self.now.max(self.horizon);
        let (ramp, slowest_for) = self.slowest();
        let mut more = slowest_for;
        let arrival = self.client.next_arrival();
        for (engine, step) in self.engines.iter_mut().zip(&self.steps) {
            if more > 0 {
                more = more.min(engine.equal_steps(step.as_ref(), start, &ramp, arrival));
            }
        }
        let span = Span { start, steps: 1 + more, end: start + ramp.elapsed(1 + more), ramp };
        let (mut with_queue, mut by_memory, mut by_seats) = (false, false, false);
        for (engine, step) in self.engines.iter_mut().zip(self.steps.drain(..)) {
            with_queue |= !engine.waiting.is_empty();
            by_memory |= step.as_ref().is_some_and(|step| step.blocked_by_memory);
            by_seats |= step.as_ref().is_some_and(|step| step.blocked_by_seats);
            if let Some(step) = step {
                engine.execute(step, &span, &mut self.outcome.gaps);
            }
            engine.horizon = span.end;
        }
        self.outcome.steps += span.steps;
        self.outcome.steps_with_queue += if with_queue { span.steps } else { 0 };
        self.outcome.steps_blocked_by_memory += if by_memory { span.steps } else { 0 };
        self.outcome.steps_blocked_by_seats += if by_seats { span.steps } else { 0 };
        self.horizon = span.end;
        self.now = if self.engines[0].config.async_scheduling { start + ramp.elapsed(more) } else { span.end };
    }

    /// The rank that the others wait for in the composed step, by its step times, and for how many equal steps behind
    /// that one it stays so.
    fn slowest(&self) -> (Ramp, u64) {
        let ramps =
            || self.engines.iter().zip(&self.steps).filter_map(|(engine, step)| Some(engine.ramp(step.as_ref()?)));
        let by_time = |a: &Ramp, b: &Ramp| a.first.total_cmp(&b.first).then(a.growth.total_cmp(&b.growth));
        let slowest = ramps().max_by(by_time).unwrap_or(Ramp { first: 0.0, growth: 0.0 });
        let overtaken = ramps().filter(|ramp| ramp.growth > slowest.growth);
        let after = overtaken.map(|ramp| (slowest.first - ramp.first) / (ramp.growth - slowest.growth));
        (slowest, after.fold(f64::INFINITY, f64::min) as u64)
    }

    fn close(self) -> Outcome {
        let mut outcome = self.outcome;
        let record = |(id, &rank): (usize, &u32)| -> Record { self.engines[rank as usize].record(id) };
        outcome.records = self.rank.iter().enumerate().map(record).collect();
        let mut recorders = Vec::new();
        let mut ratios = Vec::new();
        let mut usable = 0;
        for engine in self.engines {
            usable += u64::from(engine.config.usable_blocks());
            outcome.preemptions += engine.tally.preemptions;
            outcome.wait_cap_promotions += engine.tally.wait_cap_promotions;
            outcome.cached_tokens += engine.tally.cached_tokens;
            outcome.computed_tokens += engine.tally.computed_tokens;
            outcome.recomputed_tokens += engine.tally.recomputed_tokens;
            outcome.admission_holds += engine.admission.as_ref().map_or(0, Admission::holds);
            ratios.extend(engine.admission.as_ref().and_then(Admission::peak_ratio));
            outcome.waited_s += engine.waiting.waited_s();
            recorders.extend(engine.written.recorder);
            outcome.log = engine.written.log;
        }
        outcome.kv_peak_ratio = (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64);
        outcome.timeline = self.control.timeline.then(|| Timeline::new(recorders, usable));
        outcome
    }
}
