//! One simulated engine, or one rank of several: its queue, its residents, and what its steps do. A step is composed
//! from what is known at that moment; equal decode steps behind it are taken in one go, up to the first moment at which
//! anything could be decided otherwise.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::client::Client;
use super::config::EngineConfig;
use super::cost::Ramp;
use super::decode::DecodeSet;
use super::gaps::Gaps;
use super::input::RunInput;
use super::options::Options;
use super::outcome::{Control, Record};
use super::parts::{Coming, DecodeSlots, Evictions, Kv, Seats, Written};
use super::policy::{PolicySpec, Rule};
use super::ranker::Ranker;
use super::state::{Request, Step, Tally};
use super::trace::{Finish, Trace};
use super::waiting::Waiting;
use crate::Result;
use crate::levers::admission::{Admission, KvGrowth, Request as Candidate};
use crate::levers::aging::Aging;
use crate::readout::Kind;

/// A composed step and the equal ones behind it, in time.
pub(super) struct Span {
    pub(super) start: f64,
    pub(super) end: f64,
    /// How many.
    pub(super) steps: u64,
    pub(super) ramp: Ramp,
}

pub(super) struct Flight {
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
    control: &'a Control,
    pub(super) now: f64,
    /// End of the last composed step.
    pub(super) horizon: f64,
    pub(super) requests: Vec<Request>,
    pub(super) seats: Seats,
    pub(super) decoding: DecodeSet,
    pub(super) kv: Kv,
    pub(super) waiting: Waiting,
    pub(super) slots: DecodeSlots,
    pub(super) evictions: Evictions,
    /// Those that were preempted in the step being composed with their last token under way.
    pub(super) passing: Vec<u32>,
    /// Where the policy learns something of requests between arrival and prefill.
    coming: Option<Coming>,
    pub(super) flights: VecDeque<Flight>,
    /// How often somebody was put before all others of the queue.
    pub(super) prepended: u64,
    pub(super) admission: Option<Admission>,
    /// Whether admission control held the first of the queue back in the last composed step.
    pub(super) held: bool,
    pub(super) tally: Tally,
    pub(super) written: Written,
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        trace: &'a Trace,
        input: &'a RunInput,
        config: &'a EngineConfig,
        spec: &'a PolicySpec,
        ranker: Ranker<'a>,
        options: &Options,
        control: &'a Control,
    ) -> Result<Self> {
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
            decoded_step: 0,
            token_step: 0,
            in_a_row: false,
            last_token_s: f64::NAN,
            first_token_s: f64::NAN,
            finish_s: f64::NAN,
        };
        let growth = || KvGrowth::plain(config.block_size);
        let admission = || Admission::new(growth(), config.usable_blocks(), spec.recompute_share);
        Ok(Self {
            requests: input.rows.iter().map(request).collect(),
            seats: Seats::default(),
            decoding: DecodeSet::new(input.len(), config.block_size),
            kv: Kv::new(config),
            waiting: Waiting::new(input.len(), spec.rule == Rule::Hrrn, spec.wait_cap_s.or(options.wait_cap_s)),
            slots: DecodeSlots::new(config, spec),
            evictions: Evictions::new(spec),
            passing: Vec::new(),
            coming: ranker.is_told_late().then(|| Coming::new(spec)),
            flights: VecDeque::new(),
            prepended: 0,
            admission: spec.levers.admission.then(admission).transpose()?,
            held: false,
            tally: Tally::default(),
            written: Written::new(control),
            now: 0.0,
            horizon: 0.0,
            trace,
            input,
            config,
            spec,
            ranker,
            control,
        })
    }

    /// A request comes in that was sent at `at_s`.
    pub(super) fn arrive(&mut self, id: u32, at_s: f64) -> Result<()> {
        if self.ranker.arrived(id, at_s)?
            && let Some(coming) = &mut self.coming
        {
            coming.expect(id, at_s);
        }
        self.enqueue(id, at_s);
        self.note(at_s, self.kv.pool.free());
        Ok(())
    }

    /// Takes in the predictions that have come by now.
    pub(super) fn take_predictions(&mut self) -> Result<()> {
        while let Some(id) = self.coming.as_mut().and_then(|coming| coming.take(self.now)) {
            if self.ranker.came(id)? {
                self.learned_of(id);
            }
        }
        Ok(())
    }

    /// Something else is known of a request than before.
    fn learned_of(&mut self, id: u32) {
        self.slots.changed = true;
        if self.spec.levers.queue && self.waiting.contains(id) {
            self.waiting.rekey(id, self.ranker.queue_key(id, self.requests[id as usize].generated));
        }
        // Another predictor's score says nothing of how long a request stays.
        if let (Some(admission), Some(length)) = (&mut self.admission, self.ranker.length(id)) {
            admission.learned(u64::from(id), Some(length));
        }
    }

    pub(super) fn enqueue(&mut self, id: u32, since: f64) {
        let request = &self.requests[id as usize];
        self.waiting.push(id, self.ranker.queue_key(id, request.generated), request.prompt, since);
    }

    /// Processes the steps that have ended: hidden states arrive, finished requests give up seat and blocks.
    pub(super) fn land(&mut self, client: &mut Client) -> Result<bool> {
        let mut released = false;
        while self.flights.front().is_some_and(|flight| flight.end <= self.now) {
            let Some(flight) = self.flights.pop_front() else { break };
            for id in flight.prefilled {
                if self.ranker.prefilled(id)? {
                    self.learned_of(id);
                }
            }
            for id in flight.done {
                self.ranker.finished(id)?;
                if let Some(coming) = &mut self.coming {
                    coming.forget(id, self.now);
                }
                let row = self.input.rows[id as usize] as usize;
                if let Some(admission) = &mut self.admission
                    && self.trace.finish_of(row) != Finish::Abort
                {
                    admission.finished(self.requests[id as usize].output);
                }
                // Preempted with its last token under way, it has given up both already.
                if self.requests[id as usize].is_resident {
                    self.release_blocks(id);
                    self.leave_seat(id);
                }
                self.requests[id as usize].blocks = Vec::new();
                client.finished(flight.end);
                self.control.finished.fetch_add(1, Ordering::Relaxed);
                released = true;
            }
        }
        Ok(released)
    }

    /// When the next step that is under way ends.
    pub(super) fn next_landing(&self) -> Option<f64> {
        self.flights.front().map(|flight| flight.end)
    }

    /// When the next prediction comes in that is on its way.
    pub(super) fn next_prediction(&self) -> Option<f64> {
        self.coming.as_ref().and_then(Coming::next_s)
    }

    /// Composes the next step; `None` when there is nothing to do before a step lands or something comes in.
    pub(super) fn compose_now(&mut self) -> Option<Step> {
        loop {
            let preemptions = self.tally.preemptions;
            let step = self.compose();
            self.note(self.now, self.kv.pool.free());
            // The only one chosen to decode may have given up its blocks itself: the others go on at once.
            if step.is_none() && self.flights.is_empty() && self.tally.preemptions > preemptions {
                continue;
            }
            return step;
        }
    }

    /// How long a composed step and the equal ones behind it take here.
    pub(super) fn ramp(&self, step: &Step) -> Ramp {
        let slow = if self.next_prediction().is_none() { 1.0 } else { 1.0 / (1.0 - self.spec.gpu_share) };
        Ramp::new(&self.config.cost, &step.work, slow)
    }

    /// Runs a composed step and the equal ones behind it.
    pub(super) fn execute(&mut self, step: Step, span: &Span, gaps: &mut Gaps) {
        let &Span { start, end, steps, ref ramp } = span;
        let more = steps - 1;
        self.log_steps(&step, start, ramp, more);
        let mut done = step.done;
        if more > 0 {
            self.tally.computed_tokens += u64::from(step.work.decode) * more;
            if let Some(admission) = &mut self.admission {
                admission.stepped(u64::from(step.work.decode), 0, more);
            }
            self.note_equal_steps(start, ramp, more);
            self.take_blocks(more - 1);
            self.decoding.advance(more - 1);
            self.arrange();
            self.take_blocks(1);
            self.decoding.advance(1);
            self.finish_decoding(&mut done);
        }
        // As they stand in vLLM's running list: so they will give their blocks back.
        done.sort_unstable_by_key(|&id| self.requests[id as usize].admitted);
        let regular = u64::from(step.work.decode) - step.resumed.len() as u64;
        for (_, at) in &step.resumed {
            gaps.add(start + ramp.first - at);
        }
        gaps.add_ramp(&Ramp { growth: 0.0, ..*ramp }, 1, regular);
        if more > 0 {
            let rest = Ramp { first: ramp.first + ramp.growth, ..*ramp };
            gaps.add_ramp(&rest, more, u64::from(step.work.decode));
        }
        for &id in &step.prefilled {
            let request = &mut self.requests[id as usize];
            if request.first_token_s.is_nan() {
                request.first_token_s = end;
            } else {
                gaps.add(end - request.last_token_s);
            }
            request.last_token_s = end;
        }
        for &id in &done {
            self.requests[id as usize].finish_s = end;
        }
        self.flights.push_back(Flight { end, prefilled: step.prefilled, done });
    }

    /// How many steps equal to the one just composed, which starts at `start`, can follow it. `step` is this engine's
    /// part in it, if it has one; `arrival` is when the next request arrives.
    pub(super) fn equal_steps(&mut self, step: Option<&Step>, start: f64, ramp: &Ramp, arrival: Option<f64>) -> u64 {
        let may_go_on = match step {
            Some(step) => step.work.prefill == 0 && step.done.is_empty() && !step.preempted,
            // An engine that waits for the other ranks, but has given up blocks that somebody may have in the next step.
            None => self.waiting.is_empty(),
        };
        if !may_go_on {
            return 0;
        }
        // A step still in flight that frees a seat or brings a hidden state lands before the next composition.
        let slots_bind = self.slots.rule.bind(self.contenders());
        let estimates_matter = slots_bind || self.spec.levers.evict;
        let changes = |flight: &Flight| !flight.done.is_empty() || (estimates_matter && !flight.prefilled.is_empty());
        if self.flights.iter().any(changes) {
            return 0;
        }
        // An engine that waits for the other ranks has nobody to finish.
        let mut limit = self.decoding.steps_to_finish().unwrap_or(u64::from(u32::MAX));
        if slots_bind {
            limit = limit.min(self.slots.next_choice.saturating_sub(self.decoding.step()));
        }
        let seat_free = (self.seats.residents.len() as u32) < self.config.max_num_seqs;
        if self.held {
            return 0;
        }
        if !self.waiting.is_empty() && seat_free && self.waiting.drifts() {
            return 0;
        }
        // A resident that decodes may become bad enough to be evicted with any token.
        if !self.waiting.is_empty() && self.spec.levers.evict && self.evictions.evictor.ready(self.now) {
            return 0;
        }
        if let Some(at) = self.next_decision(seat_free, slots_bind, arrival) {
            limit = if self.config.async_scheduling {
                // Step i behind this one is composed when step i - 1 starts.
                if start >= at { 0 } else { limit.min(ramp.steps_before(at - start, limit) + 1) }
            } else {
                ramp.steps_before(at - start, limit)
            };
        }
        self.decoding.steps_with_blocks(self.kv.pool.free(), limit)
    }

    /// The next moment from outside that could change what the following step does.
    fn next_decision(&self, seat_free: bool, slots_bind: bool, arrival: Option<f64>) -> Option<f64> {
        let evicts = self.spec.levers.evict;
        // A prediction that comes in orders the slots, and the last one gives the GPU back.
        let comes = (slots_bind || self.spec.gpu_share > 0.0) && self.coming.is_some();
        // With every seat taken an arrival changes nothing but whether there is a queue at all, unless it may go to
        // another rank: that depends on the time.
        let several = self.config.data_parallel_size > 1;
        // Relative aging goes by the number that wait.
        let counts = matches!(self.spec.aging, Aging::PerWait(_));
        let matters = seat_free || evicts || comes || several || counts || self.waiting.is_empty();
        let outside = arrival.into_iter().chain(self.next_prediction()).filter(|_| matters).min_by(f64::total_cmp);
        let promotion = if seat_free || evicts { self.waiting.next_promotion() } else { None };
        let eviction = if evicts && !self.waiting.is_empty() { self.evictions.evictor.next_s(self.now) } else { None };
        [outside, promotion.filter(|&at| at > self.now), eviction].into_iter().flatten().min_by(f64::total_cmp)
    }

    /// Whether admission control lets a waiting request in that finds `shared_blocks` blocks with others; from then on it
    /// counts it as inside.
    pub(super) fn lets_in(&mut self, id: u32, shared_blocks: u32) -> bool {
        let Some(admission) = &mut self.admission else { return true };
        let (requests, decoding) = (&self.requests, &self.decoding);
        admission.all_progressed(|id| requests[id as usize].generated + decoding.progress(id as u32));
        let Request { prompt, generated, .. } = requests[id as usize];
        let (cap, length) = (self.ranker.limit_of(id), self.ranker.length(id));
        let candidate = Candidate { prompt, cap, shared_blocks, length };
        self.held = !admission.has_room(&candidate, generated);
        if self.held {
            admission.held();
        } else {
            admission.admitted(u64::from(id), candidate);
        }
        !self.held
    }

    /// What is to say of a request in the end.
    pub(super) fn record(&self, id: usize) -> Record {
        let request = &self.requests[id];
        Record {
            row: self.input.rows[id],
            preemptions: request.preemptions,
            arrival_s: self.input.arrival_s[id],
            admitted_s: request.admitted_s,
            first_token_s: request.first_token_s,
            finish_s: request.finish_s,
            predicted: Kind::ALL.map(|readout| self.ranker.predicted.get(readout, id)),
        }
    }
}
