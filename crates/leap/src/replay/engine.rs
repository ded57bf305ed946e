//! The simulated engine: steps in time. A step is composed from what is known at that moment; equal decode steps
//! behind it are taken in one go, up to the first moment at which anything could be decided otherwise.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::blocks::BlockPool;
use super::config::EngineConfig;
use super::cost::Ramp;
use super::decode::DecodeSet;
use super::input::RunInput;
use super::options::Options;
use super::outcome::{Control, Outcome, Record};
use super::policy::{PolicySpec, Rule};
use super::ranker::{Ranker, Readouts};
use super::state::{Request, Step};
use super::timeline::{Level, Recorder, Timeline};
use super::trace::Trace;
use super::waiting::Waiting;
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
    let ranker = Ranker::new(spec, trace, input, readouts, options.output_budget(trace, readouts))?;
    Engine::new(trace, input, config, spec, ranker, options, control).run()
}

struct Flight {
    end: f64,
    prefilled: Vec<u32>,
    done: Vec<u32>,
}

pub(super) struct Engine<'a> {
    pub(super) trace: &'a Trace,
    pub(super) input: &'a RunInput,
    pub(super) config: &'a EngineConfig,
    pub(super) spec: &'a PolicySpec,
    pub(super) ranker: Ranker<'a>,
    max_concurrency: usize,
    control: &'a Control,
    pub(super) now: f64,
    /// End of the last composed step.
    pub(super) horizon: f64,
    pub(super) requests: Vec<Request>,
    /// Holders of a seat, in no order.
    pub(super) residents: Vec<u32>,
    /// Residents that prefill, in order of admission.
    pub(super) prefilling: Vec<u32>,
    /// Residents that could decode and do not.
    pub(super) ready: Vec<u32>,
    pub(super) decoding: DecodeSet,
    pub(super) pool: BlockPool,
    pub(super) waiting: Waiting,
    pub(super) slots_changed: bool,
    pub(super) next_slot_choice: u64,
    /// When the evict lever may act again.
    pub(super) next_evict_s: f64,
    next_arrival: usize,
    inside: usize,
    /// When the engine last was as full as the client lets it be.
    room_since_s: f64,
    delayed: VecDeque<(f64, u32)>,
    flights: VecDeque<Flight>,
    pub(super) admissions: u64,
    pub(super) outcome: Outcome,
    recorder: Option<Recorder>,
}

impl<'a> Engine<'a> {
    fn new(
        trace: &'a Trace,
        input: &'a RunInput,
        config: &'a EngineConfig,
        spec: &'a PolicySpec,
        ranker: Ranker<'a>,
        options: &Options,
        control: &'a Control,
    ) -> Self {
        let request = |&row: &u32| Request {
            prompt: trace.prompt_tokens[row as usize],
            output: trace.output_tokens[row as usize],
            generated: 0,
            computed: 0,
            blocks: Vec::new(),
            is_resident: false,
            admitted: 0,
            admitted_s: f64::NAN,
            preemptions: 0,
            last_decode_step: 0,
            last_token_s: f64::NAN,
            first_token_s: f64::NAN,
            finish_s: f64::NAN,
        };
        Self {
            requests: input.rows.iter().map(request).collect(),
            residents: Vec::new(),
            prefilling: Vec::new(),
            ready: Vec::new(),
            decoding: DecodeSet::new(input.len(), config.block_size),
            pool: BlockPool::new(config.usable_blocks()),
            waiting: Waiting::new(input.len(), spec.rule == Rule::Hrrn, spec.wait_cap_s.or(options.wait_cap_s)),
            slots_changed: true,
            next_slot_choice: 0,
            next_evict_s: 0.0,
            next_arrival: 0,
            inside: 0,
            room_since_s: 0.0,
            delayed: VecDeque::new(),
            flights: VecDeque::new(),
            admissions: 0,
            outcome: Outcome::default(),
            recorder: control.timeline.then(Recorder::default),
            now: 0.0,
            horizon: 0.0,
            max_concurrency: options.max_concurrency.map_or(usize::MAX, |most| most as usize),
            trace,
            input,
            config,
            spec,
            ranker,
            control,
        }
    }

    fn run(mut self) -> Result<Outcome> {
        loop {
            if self.control.cancel.load(Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
            self.take_in()?;
            if self.land()? {
                self.take_in()?;
            }
            let preemptions = self.outcome.preemptions;
            let step = self.compose();
            self.note(self.now, self.pool.free());
            if let Some(step) = step {
                self.execute(step);
                continue;
            }
            // The only one chosen to decode may have given up its blocks itself: the others go on at once.
            if self.flights.is_empty() && self.outcome.preemptions > preemptions {
                continue;
            }
            let next = match self.flights.front() {
                Some(flight) => flight.end,
                None => match self.next_event() {
                    Some(at) => at,
                    None => break,
                },
            };
            self.now = self.now.max(next);
        }
        if !self.waiting.is_empty() || !self.residents.is_empty() || self.next_arrival < self.input.len() {
            return Err(Error::Config(format!(
                "policy {}: the engine stands still at {:.3} s with {} waiting and {} resident",
                self.spec,
                self.now,
                self.waiting.len(),
                self.residents.len()
            )));
        }
        Ok(self.close())
    }

    /// Lets in what has arrived by now, and what another predictor has scored by now.
    fn take_in(&mut self) -> Result<()> {
        while self.next_arrival < self.input.len() && self.inside < self.max_concurrency {
            let id = self.next_arrival as u32;
            let at = self.input.arrival_s[self.next_arrival];
            if at > self.now {
                break;
            }
            self.next_arrival += 1;
            self.inside += 1;
            self.ranker.arrived(id)?;
            // Under a concurrency limit the client may hold a request back beyond its planned arrival.
            let entered = at.max(self.room_since_s);
            if self.ranker.is_delayed() {
                self.delayed.push_back((entered + self.spec.delay_s, id));
            }
            self.enqueue(id, entered);
            self.note(entered, self.pool.free());
        }
        while let Some(&(at, id)) = self.delayed.front() {
            if at > self.now {
                break;
            }
            self.delayed.pop_front();
            self.ranker.scored(id);
            self.slots_changed = true;
            self.rekey_waiting(id);
        }
        Ok(())
    }

    fn rekey_waiting(&mut self, id: u32) {
        if self.waiting.contains(id) {
            self.waiting.rekey(id, self.ranker.queue_key(id, self.requests[id as usize].generated));
        }
    }

    pub(super) fn enqueue(&mut self, id: u32, since: f64) {
        let request = &self.requests[id as usize];
        self.waiting.push(id, self.ranker.queue_key(id, request.generated), request.prompt, since);
    }

    /// Processes the steps that have ended: hidden states arrive, finished requests give up seat and blocks.
    fn land(&mut self) -> Result<bool> {
        let mut released = false;
        while self.flights.front().is_some_and(|flight| flight.end <= self.now) {
            let Some(mut flight) = self.flights.pop_front() else { break };
            // In the order of vLLM's running list, which is the order in which their blocks will be handed out.
            flight.done.sort_unstable_by_key(|&id| self.requests[id as usize].admitted);
            for id in flight.prefilled {
                if self.ranker.prefilled(id)? {
                    self.slots_changed = true;
                    self.rekey_waiting(id);
                }
            }
            for id in flight.done {
                self.ranker.finished(id)?;
                self.release_blocks(id);
                self.requests[id as usize].blocks = Vec::new();
                self.leave_seat(id);
                if self.inside == self.max_concurrency {
                    self.room_since_s = flight.end;
                }
                self.inside -= 1;
                self.control.finished.fetch_add(1, Ordering::Relaxed);
                released = true;
            }
        }
        Ok(released)
    }

    /// Takes down what is held from `at_s` on, with `free` KV blocks.
    fn note(&mut self, at_s: f64, free: u32) {
        if let Some(recorder) = &mut self.recorder {
            let blocks = i64::from(self.config.usable_blocks()) - i64::from(free);
            let level = Level { waiting: self.waiting.len() as i64, resident: self.residents.len() as i64, blocks };
            recorder.note(at_s, level);
        }
    }

    /// Takes down the blocks that each of `more` equal steps behind the last composed one takes when it is composed.
    fn note_equal_steps(&mut self, start: f64, ramp: &Ramp, more: u64) {
        if self.recorder.is_none() {
            return;
        }
        let mut free = self.pool.free();
        for ahead in 1..=more {
            free -= self.decoding.need_block(ahead).len() as u32;
            let composed = if self.config.async_scheduling { ahead - 1 } else { ahead };
            self.note(start + ramp.elapsed(composed), free);
        }
    }

    /// The next moment at which something comes from outside.
    fn next_event(&self) -> Option<f64> {
        let arrival = (self.inside < self.max_concurrency)
            .then(|| self.input.arrival_s.get(self.next_arrival).copied())
            .flatten();
        let scored = self.delayed.front().map(|&(at, _)| at);
        [arrival, scored].into_iter().flatten().min_by(f64::total_cmp)
    }

    /// Runs a composed step and the equal ones behind it.
    fn execute(&mut self, step: Step) {
        let start = self.now.max(self.horizon);
        let slow = if self.delayed.is_empty() { 1.0 } else { 1.0 / (1.0 - self.spec.gpu_share) };
        let ramp = Ramp::new(&self.config.cost, &step.work, slow);
        let more = if step.work.prefill == 0 && step.done.is_empty() && !step.preempted {
            self.equal_steps(start, &ramp)
        } else {
            0
        };
        let mut done = step.done;
        if more > 0 {
            self.note_equal_steps(start, &ramp, more);
            self.take_blocks(more);
            self.decoding.advance(more);
            self.finish_decoding(&mut done);
        }
        let steps = 1 + more;
        let end = start + ramp.elapsed(steps);
        let regular = u64::from(step.work.decode) - step.resumed.len() as u64;
        for (_, at) in &step.resumed {
            self.outcome.gaps.add(start + ramp.first - at);
        }
        self.outcome.gaps.add_ramp(&Ramp { growth: 0.0, ..ramp }, 1, regular);
        if more > 0 {
            let rest = Ramp { first: ramp.first + ramp.growth, ..ramp };
            self.outcome.gaps.add_ramp(&rest, more, u64::from(step.work.decode));
        }
        for &id in &step.prefilled {
            let request = &mut self.requests[id as usize];
            if request.first_token_s.is_nan() {
                request.first_token_s = end;
            } else {
                self.outcome.gaps.add(end - request.last_token_s);
            }
            request.last_token_s = end;
        }
        for &id in &done {
            self.requests[id as usize].finish_s = end;
        }
        self.outcome.steps += steps;
        if !self.waiting.is_empty() {
            self.outcome.steps_with_queue += steps;
        }
        if step.blocked_by_memory {
            self.outcome.steps_blocked_by_memory += steps;
        }
        self.flights.push_back(Flight { end, prefilled: step.prefilled, done });
        self.horizon = end;
        self.now = if self.config.async_scheduling { start + ramp.elapsed(more) } else { end };
    }

    /// How many steps equal to the one just composed, which starts at `start`, can follow it.
    fn equal_steps(&mut self, start: f64, ramp: &Ramp) -> u64 {
        // A step still in flight that frees a seat or brings a hidden state lands before the next composition.
        let slots_bind = self.decoding.len() + self.ready.len() as u32 > self.config.slots();
        let estimates_matter = slots_bind || self.spec.levers.evict;
        let changes = |flight: &Flight| !flight.done.is_empty() || (estimates_matter && !flight.prefilled.is_empty());
        if self.flights.iter().any(changes) {
            return 0;
        }
        let Some(to_finish) = self.decoding.steps_to_finish() else { return 0 };
        let mut limit = to_finish;
        if slots_bind {
            limit = limit.min(self.next_slot_choice.saturating_sub(self.decoding.step()));
        }
        let seat_free = (self.residents.len() as u32) < self.config.max_num_seqs;
        if !self.waiting.is_empty() && seat_free && self.waiting.drifts() {
            return 0;
        }
        // A resident that decodes may become bad enough to be evicted with any token.
        let may_evict = self.spec.levers.evict && self.spec.evict_per_s > 0.0 && self.next_evict_s <= self.now;
        if !self.waiting.is_empty() && may_evict {
            return 0;
        }
        if let Some(at) = self.next_decision(seat_free, slots_bind) {
            limit = if self.config.async_scheduling {
                // Step i behind this one is composed when step i - 1 starts.
                if start >= at { 0 } else { limit.min(ramp.steps_before(at - start, limit) + 1) }
            } else {
                ramp.steps_before(at - start, limit)
            };
        }
        self.decoding.steps_with_blocks(self.pool.free(), limit)
    }

    /// The next moment from outside that could change what the following step does.
    fn next_decision(&mut self, seat_free: bool, slots_bind: bool) -> Option<f64> {
        let evicts = self.spec.levers.evict;
        // A score that comes in orders the slots, and the last one gives the GPU back.
        let scores = (slots_bind || self.spec.gpu_share > 0.0) && self.ranker.is_delayed();
        // With every seat taken an arrival changes nothing but whether there is a queue at all.
        let matters = seat_free || evicts || scores || self.waiting.is_empty();
        let outside = if matters { self.next_event() } else { None };
        let promotion = if seat_free || evicts { self.waiting.next_promotion() } else { None };
        let eviction = (evicts && !self.waiting.is_empty() && self.spec.evict_per_s > 0.0)
            .then_some(self.next_evict_s)
            .filter(|&at| at > self.now);
        [outside, promotion.filter(|&at| at > self.now), eviction].into_iter().flatten().min_by(f64::total_cmp)
    }

    fn close(mut self) -> Outcome {
        let predicted = |column: &[f32], id: usize| column.get(id).copied().unwrap_or(f32::NAN);
        let [before, after] = &self.ranker.predicted;
        self.outcome.records = self
            .requests
            .iter()
            .enumerate()
            .map(|(id, request)| Record {
                row: self.input.rows[id],
                preemptions: request.preemptions,
                arrival_s: self.input.arrival_s[id],
                admitted_s: request.admitted_s,
                first_token_s: request.first_token_s,
                finish_s: request.finish_s,
                predicted: [predicted(before, id), predicted(after, id)],
            })
            .collect();
        self.outcome.waited_s = self.waiting.waited_s();
        let usable = u64::from(self.config.usable_blocks());
        self.outcome.timeline = self.recorder.map(|recorder| Timeline::new([recorder], usable));
        self.outcome
    }
}
