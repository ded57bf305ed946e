//! What one simulated policy knows of each request, and the keys that follow from it. A prediction is there only once
//! its cost has been paid: the prompt readout on arrival, the state readout at the end of prefill, somebody else's
//! score after its delay. Every finished request teaches the readouts of this run and no other.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use super::input::RunInput;
use super::policy::{PolicySpec, Rule};
use super::trace::{Finish, Trace, are_lengths};
use crate::levers::aging::{AgingClock, Arrival};
use crate::online::{Label, OnlineReadout};
use crate::prompt::length_features;
use crate::queue::static_key;
use crate::readout::Kind;
use crate::remaining::{Order, RemainingTable, SurvivalFunction, next_level};
use crate::rows::Row;
use crate::{Error, Result};

/// Attained service up to which a request stays in the first level of `mlfq`; each level is four times as long.
const MLFQ_QUANTUM: u32 = 32;

/// The readouts that a run starts from; each run learns on copies of its own.
#[derive(Clone, Default)]
pub struct Readouts {
    /// Before prefill.
    pub prompt: Option<OnlineReadout>,
    /// After it.
    pub state: Option<OnlineReadout>,
}

impl Readouts {
    /// The prompt readout and the state readout, where a policy can use them on a trace.
    fn used_by(&self, spec: &PolicySpec, trace: &Trace) -> [Option<&OnlineReadout>; 2] {
        let prompt = self.prompt.as_ref().filter(|_| spec.rule == Rule::Leap);
        let state = self.state.as_ref().filter(|_| spec.has_readout() && trace.features.is_some());
        [prompt, state]
    }
}

/// Predicted tokens of each request, before prefill (by the prompt readout or another predictor's score) and after it (by
/// the state readout); NaN where nothing was known. The ranks of a deployment share them: a request that comes again may
/// come to another rank.
pub struct Predicted([Vec<Cell<f32>>; 3]);

impl Predicted {
    pub fn new(spec: &PolicySpec, trace: &Trace, input: &RunInput, readouts: &Readouts) -> Result<Self> {
        let [prompt, state] = readouts.used_by(spec, trace);
        let before = prompt.is_some() || !spec.scores(trace)?.is_empty();
        let unknown = |there: bool| if there { vec![Cell::new(f32::NAN); input.len()] } else { Vec::new() };
        Ok(Self([unknown(before), unknown(false), unknown(state.is_some())]))
    }

    /// Tokens that a readout, or another predictor before prefill, predicted; NaN also where it predicts nothing at all.
    pub fn get(&self, readout: Kind, id: usize) -> f32 {
        self.0[readout as usize].get(id).map_or(f32::NAN, Cell::get)
    }

    fn set(&self, readout: Kind, id: u32, tokens: f32) {
        if let Some(predicted) = self.0[readout as usize].get(id as usize) {
            predicted.set(tokens);
        }
    }

    /// Whether `readout` predicts at all and has not predicted of `id` yet.
    fn lacks(&self, readout: Kind, id: u32) -> bool {
        self.0[readout as usize].get(id as usize).is_some_and(|tokens| tokens.get().is_nan())
    }
}

/// Predictions and keys of one run.
pub struct Ranker<'a> {
    spec: &'a PolicySpec,
    trace: &'a Trace,
    input: &'a RunInput,
    prompt: Option<OnlineReadout>,
    state: Option<OnlineReadout>,
    scores: &'a [f32],
    scores_are_lengths: bool,
    max_tokens: u32,
    /// What each request's remaining tokens are read from, once something is known of it and until it has finished.
    known: Vec<Option<Box<RemainingTable>>>,
    /// Where rows come again: the request that each row was first, by row.
    first: Vec<u32>,
    finished: u64,
    finished_tokens: u64,
    /// What waiting is worth, and what it was when each request arrived.
    pub(super) clock: AgingClock,
    arrivals: Vec<Arrival>,
    pub(super) predicted: Rc<Predicted>,
}

impl<'a> Ranker<'a> {
    pub fn new(
        spec: &'a PolicySpec,
        trace: &'a Trace,
        input: &'a RunInput,
        readouts: &Readouts,
        predicted: Rc<Predicted>,
        max_tokens: u32,
    ) -> Result<Self> {
        let scores = spec.scores(trace)?;
        let reads = spec.has_readout();
        let batched = |readout: &OnlineReadout| readout.clone().with_batch(spec.batch);
        let [prompt, state] = readouts.used_by(spec, trace).map(|readout| readout.map(batched));
        let mut first = Vec::new();
        if reads && input.len() > input.round {
            first = vec![0; trace.len()];
            for (id, &row) in input.rows.iter().enumerate().take(input.round) {
                first[row as usize] = id as u32;
            }
        }
        Ok(Self {
            predicted,
            prompt,
            state,
            scores_are_lengths: are_lengths(scores),
            scores,
            max_tokens,
            known: if reads { vec![None; input.len()] } else { Vec::new() },
            first,
            finished: 0,
            finished_tokens: 0,
            clock: AgingClock::new(spec.aging)?,
            arrivals: vec![Arrival { aged: 0.0, mean_tokens: f64::INFINITY }; input.len()],
            spec,
            trace,
            input,
        })
    }

    fn row(&self, id: u32) -> usize {
        self.input.rows[id as usize] as usize
    }

    fn cap(&self, row: usize) -> u32 {
        self.trace.max_tokens.as_ref().map_or(self.max_tokens, |limits| limits[row].min(self.max_tokens)).max(1)
    }

    /// The request that had the same row before `id`, if one did. What was predicted of it then holds again: by now
    /// the readouts may have learnt its length.
    fn earlier(&self, id: u32) -> Option<usize> {
        (id as usize >= self.input.round).then(|| self.first.get(self.row(id)).map(|&id| id as usize)).flatten()
    }

    /// Takes over what a readout predicted of an earlier request with the same row.
    fn recall(&mut self, readout: Kind, id: u32, earlier: usize) -> bool {
        let tokens = self.predicted.get(readout, earlier);
        let score = if tokens.is_nan() { self.running_mean() } else { tokens.sqrt() };
        self.predicted.set(readout, id, tokens);
        if readout == Kind::Prompt || !tokens.is_nan() {
            self.learn_of(readout, id, score);
        }
        !tokens.is_nan()
    }

    /// Whether a request is ordered by nothing until a delay has passed after its arrival.
    pub fn is_delayed(&self) -> bool {
        !self.scores.is_empty() && self.spec.delay_s > 0.0
    }

    /// A request has arrived: what can be known before prefill is known now.
    pub fn arrived(&mut self, id: u32, at_s: f64) -> Result<()> {
        self.arrivals[id as usize] = self.clock.arrival(at_s);
        let row = self.row(id);
        if !self.scores.is_empty() && !self.is_delayed() {
            self.scored(id);
        }
        if let Some(earlier) = self.earlier(id) {
            self.recall(Kind::Prompt, id, earlier);
            return Ok(());
        }
        let Some(prompt) = self.prompt.as_mut() else {
            if !self.known.is_empty() {
                let score = self.running_mean();
                self.learn_of(Kind::Prompt, id, score);
            }
            return Ok(());
        };
        let estimate = with_prompt_row(self.trace, row, |features| prompt.estimate(features));
        let estimate = estimate.map_err(|error| in_row("prompt_features", row, error))?;
        if estimate.known {
            self.predicted.set(Kind::Prompt, id, estimate.score * estimate.score);
        }
        self.learn_of(Kind::Prompt, id, estimate.score);
        Ok(())
    }

    /// Another predictor's score has come in.
    pub fn scored(&mut self, id: u32) {
        self.predicted.set(Kind::Prompt, id, self.scores[self.row(id)]);
    }

    /// A request's prefill has ended: its hidden state is there. Says whether it changed what is known.
    pub fn prefilled(&mut self, id: u32) -> Result<bool> {
        let row = self.row(id);
        // A resumed request has its hidden state from the first time.
        if !self.predicted.lacks(Kind::State, id) {
            return Ok(false);
        }
        if let Some(earlier) = self.earlier(id) {
            return Ok(self.recall(Kind::State, id, earlier));
        }
        let (Some(state), Some(features)) = (self.state.as_mut(), self.trace.features.as_ref()) else {
            return Ok(false);
        };
        let estimate = state.estimate(features.row(row)).map_err(|error| in_row("features", row, error))?;
        if !estimate.known {
            return Ok(false);
        }
        self.predicted.set(Kind::State, id, estimate.score * estimate.score);
        self.learn_of(Kind::State, id, estimate.score);
        Ok(true)
    }

    /// Sets what is known of a request: the score of a readout, with that one's noise.
    fn learn_of(&mut self, readout: Kind, id: u32, score: f32) {
        let own = if readout == Kind::Prompt { &self.prompt } else { &self.state };
        let noise = own.as_ref().or(self.state.as_ref()).map(OnlineReadout::noise);
        let (order, objective, cap) = (self.spec.order, self.spec.objective, self.cap(self.row(id)));
        let table = match noise {
            Some(noise) => RemainingTable::new(order, objective, score, noise, cap),
            None => RemainingTable::normal(order, objective, score, f64::from(score) / 2.0, cap),
        };
        self.known[id as usize] = Some(Box::new(table));
    }

    fn running_mean(&self) -> f32 {
        let mean = if self.finished > 0 {
            self.finished_tokens as f64 / self.finished as f64
        } else {
            f64::from(self.max_tokens) / 4.0
        };
        mean.sqrt() as f32
    }

    /// A request has finished: the readouts of this run learn from it, where it is a label.
    pub fn finished(&mut self, id: u32) -> Result<()> {
        let row = self.row(id);
        let tokens = self.trace.output_tokens[row];
        self.finished += 1;
        self.finished_tokens += u64::from(tokens);
        if let Some(known) = self.known.get_mut(id as usize) {
            *known = None;
        }
        let finish = self.trace.finish_of(row);
        self.clock.finished((finish != Finish::Abort).then_some(tokens));
        let label = match finish {
            Finish::Stop => Label::Exact(tokens),
            Finish::Length => Label::Censored(tokens),
            Finish::Abort => return Ok(()),
        };
        if !self.spec.rls || self.earlier(id).is_some() {
            return Ok(());
        }
        if let Some(prompt) = self.prompt.as_mut() {
            with_prompt_row(self.trace, row, |features| prompt.observe(features, label))?;
        }
        if let (Some(state), Some(features)) = (self.state.as_mut(), self.trace.features.as_ref()) {
            state.observe(features.row(row), label)?;
        }
        Ok(())
    }

    /// Remaining length of `id` after `generated` tokens by the policy's order, and the mean remaining length.
    fn remaining(&self, id: u32, generated: u32) -> (f64, f64) {
        let row = self.row(id);
        let a = f64::from(generated);
        let same = |remaining: f64| (remaining, remaining);
        match &self.spec.rule {
            Rule::Fcfs | Rule::Hrrn => same(1.0),
            Rule::SjfPrompt => same(f64::from(self.trace.prompt_tokens[row])),
            Rule::Las => same(1.0 + a),
            Rule::Mlfq => {
                let mut quantum = MLFQ_QUANTUM;
                while generated >= quantum {
                    quantum = quantum.saturating_mul(4);
                }
                same(f64::from(quantum))
            }
            Rule::SjfOracle => same(f64::from(self.trace.output_tokens[row])),
            Rule::SrptOracle => same(f64::from(self.trace.output_tokens[row] - generated).max(1.0)),
            Rule::Score(_) => {
                let score = f64::from(self.predicted.get(Kind::Prompt, id as usize));
                if score.is_nan() {
                    return same(f64::from(self.running_mean()).powi(2));
                }
                // A score that is no length still orders: as the logarithm of one.
                same(if self.scores_are_lengths { (score - a).max(1.0) } else { score.min(700.0).exp() })
            }
            Rule::LeapFrozen | Rule::LeapPaper | Rule::Leap => {
                let known = self.known[id as usize].as_ref();
                known.map_or((1.0, 1.0), |table| (table.remaining(generated), table.mean_remaining(generated)))
            }
        }
    }

    fn key(&self, id: u32, generated: u32, memory_weight: f64) -> f64 {
        let (remaining, mean) = self.remaining(id, generated);
        let prompt = f64::from(self.trace.prompt_tokens[self.row(id)]);
        let tokens = prompt + f64::from(generated) + mean / 2.0;
        let arrival = self.arrivals[id as usize];
        // Of what is no length of an answer the mean length says nothing.
        let is_length = match self.spec.rule {
            Rule::Score(_) => self.scores_are_lengths,
            Rule::SjfOracle | Rule::SrptOracle => true,
            _ => self.spec.has_readout(),
        };
        let remaining =
            if is_length { self.clock.boosted(remaining, arrival, self.spec.is_squared()) } else { remaining };
        static_key(remaining, 1.0, arrival.aged, memory_weight, tokens)
    }

    /// The request's own length, where the policy knows anything of it.
    pub fn length(&self, id: u32) -> Option<Arc<SurvivalFunction>> {
        let row = self.row(id);
        match self.spec.rule {
            Rule::SjfOracle | Rule::SrptOracle => {
                Some(Arc::new(SurvivalFunction::certain(self.trace.output_tokens[row])))
            }
            _ => {
                let predicted = Kind::ALL
                    .iter()
                    .any(|&readout| !self.predicted.get(readout, id as usize).is_nan());
                let known = self.known.get(id as usize)?.as_ref().filter(|_| predicted)?;
                Some(Arc::clone(known.length()))
            }
        }
    }

    /// Tokens that a request stops at, at the latest.
    pub fn cap_of(&self, id: u32) -> u32 {
        self.cap(self.row(id))
    }

    /// Key of a request in the waiting queue.
    pub fn queue_key(&self, id: u32, generated: u32) -> f64 {
        if self.spec.levers.queue { self.key(id, generated, self.spec.memory_weight) } else { f64::from(id) }
    }

    /// Key of a request against others for KV memory, in the unit of the queue's key.
    pub fn evict_key(&self, id: u32, generated: u32) -> f64 {
        self.key(id, generated, self.spec.memory_weight)
    }

    /// Key of a resident for the decode slots.
    pub fn slot_key(&self, id: u32, generated: u32) -> f64 {
        let key = || self.key(id, generated, self.spec.slots_memory_weight);
        if self.spec.levers.slots { key() } else { f64::from(id) }
    }

    /// Tokens generated at which a decoding request's slot key may have become worse; `u32::MAX` when it never does.
    pub fn next_rekey(&self, generated: u32) -> u32 {
        let attained = matches!(self.spec.rule, Rule::Las | Rule::Mlfq);
        let revised = self.spec.has_readout() && self.spec.order != Order::Countdown;
        if self.spec.levers.slots && (attained || revised) { next_level(generated) } else { u32::MAX }
    }
}

/// Hands on a request's prompt features, or its length terms where the trace carries no features.
fn with_prompt_row<T>(trace: &Trace, row: usize, act: impl FnOnce(Row<'_>) -> T) -> T {
    match &trace.prompt_features {
        Some(features) => act(features.row(row)),
        None => act(Row::F32(&length_features(trace.prompt_tokens[row]))),
    }
}

fn in_row(column: &str, row: usize, error: Error) -> Error {
    match error {
        Error::Readout(text) => Error::Readout(format!("column {column}, row {row}: {text}")),
        other => other,
    }
}
