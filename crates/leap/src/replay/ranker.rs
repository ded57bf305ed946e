//! What one simulated policy knows of each request, and the keys that follow from it. A prediction is there only once
//! its cost has been paid (a length that the client has settled costs none): the prompt readout's on arrival, the text readout's when the encoder has read the prompt, the
//! state readout's at the end of prefill, somebody else's score after its delay. Every finished request teaches the
//! readouts of this run and no other.

use std::rc::Rc;
use std::sync::Arc;

use super::input::RunInput;
use super::policy::{PolicySpec, Rule};
use super::readouts::{Predicted, Readouts};
use super::trace::{Finish, Trace, are_lengths};
use crate::levers::aging::{AgingClock, Arrival};
use crate::online::{Estimate, Label, OnlineReadout};
use crate::queue::static_key;
use crate::readout::Kind;
use crate::remaining::{Order, RemainingTable, SurvivalFunction, next_level};
use crate::{Error, Result};

/// Attained service up to which a request stays in the first level of `mlfq`; each level is four times as long.
const MLFQ_QUANTUM: u32 = 32;

/// Predictions and keys of one run.
pub struct Ranker<'a> {
    spec: &'a PolicySpec,
    trace: &'a Trace,
    input: &'a RunInput,
    readouts: [Option<OnlineReadout>; 3],
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
        let mut first = Vec::new();
        if reads && input.len() > input.round {
            first = vec![0; trace.len()];
            for (id, &row) in input.rows.iter().enumerate().take(input.round) {
                first[row as usize] = id as u32;
            }
        }
        Ok(Self {
            predicted,
            readouts: readouts.used_by(spec, trace).map(|readout| readout.map(batched)),
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
        self.learn_of(readout, id, Estimate { score, known: !tokens.is_nan() })
    }

    /// Asks a readout, or the running mean where this run has none of the kind.
    fn predict(&mut self, readout: Kind, id: u32) -> Result<bool> {
        let row = self.row(id);
        let of_row = self.readouts[readout as usize]
            .as_mut()
            .and_then(|own| self.trace.with_row(readout, row, |features| own.estimate(features)))
            .transpose()
            .map_err(|error| in_row(Trace::column(readout), row, error))?;
        let estimate = of_row.unwrap_or_else(|| Estimate { score: self.running_mean(), known: false });
        if estimate.known {
            self.predicted.set(readout, id, estimate.score * estimate.score);
        }
        Ok(self.learn_of(readout, id, estimate))
    }

    /// Whether something is known of a request only a while after it has arrived, and before its prefill.
    pub fn is_told_late(&self) -> bool {
        (!self.scores.is_empty() && self.spec.delay_s > 0.0) || self.reads_text()
    }

    fn reads_text(&self) -> bool {
        self.readouts[Kind::Text as usize].is_some()
    }

    /// A request has arrived: what can be known at once is known now. Says whether more is to [come](Self::came).
    pub fn arrived(&mut self, id: u32, at_s: f64) -> Result<bool> {
        self.arrivals[id as usize] = self.clock.arrival(at_s);
        if !self.scores.is_empty() {
            let late = self.is_told_late();
            if !late {
                self.came(id)?;
            }
            return Ok(late);
        }
        if self.known.is_empty() {
            return Ok(false);
        }
        if let Some(length) = self.trace.settled(self.row(id)) {
            let table = RemainingTable::of_length(self.spec.order, self.spec.objective, length);
            self.known[id as usize] = Some(Box::new(table));
            return Ok(false);
        }
        let Some(earlier) = self.earlier(id) else {
            self.predict(Kind::Prompt, id)?;
            return Ok(self.reads_text());
        };
        self.recall(Kind::Prompt, id, earlier);
        let read = self.predicted.is_read(earlier);
        if read {
            self.recall(Kind::Text, id, earlier);
        }
        Ok(self.reads_text() && !read)
    }

    /// Another predictor's score has come in, or the encoder has read the prompt. Says whether it changed what is known.
    pub fn came(&mut self, id: u32) -> Result<bool> {
        if !self.scores.is_empty() {
            self.predicted.set(Kind::Prompt, id, self.scores[self.row(id)]);
            return Ok(true);
        }
        // It may have finished while its prompt was being read.
        if self.known[id as usize].is_none() {
            return Ok(false);
        }
        self.predicted.set_read(id);
        match self.earlier(id).filter(|&earlier| self.predicted.is_read(earlier)) {
            Some(earlier) => Ok(self.recall(Kind::Text, id, earlier)),
            None => self.predict(Kind::Text, id),
        }
    }

    /// A request's prefill has ended: its hidden state is there. Says whether it changed what is known.
    pub fn prefilled(&mut self, id: u32) -> Result<bool> {
        // A resumed request has its hidden state from the first time.
        if !self.predicted.lacks(Kind::State, id) || self.trace.settled(self.row(id)).is_some() {
            return Ok(false);
        }
        match self.earlier(id) {
            Some(earlier) => Ok(self.recall(Kind::State, id, earlier)),
            None => self.predict(Kind::State, id),
        }
    }

    /// Takes in the score of a readout, with that one's noise; says whether it changed what is known. A readout that has
    /// learnt nothing is heard on arrival alone, and none where one that knows more has spoken.
    fn learn_of(&mut self, readout: Kind, id: u32, estimate: Estimate) -> bool {
        let heard = estimate.known || readout == Kind::Prompt;
        if !heard || self.predicted.knows_better(readout, id) {
            return false;
        }
        let any = || self.readouts.iter().rev().flatten().next();
        let noise = self.readouts[readout as usize].as_ref().or_else(any).map(OnlineReadout::noise);
        let (order, objective, cap) = (self.spec.order, self.spec.objective, self.cap(self.row(id)));
        let score = estimate.score;
        let table = match noise {
            Some(noise) => RemainingTable::new(order, objective, score, noise, cap),
            None => RemainingTable::normal(order, objective, score, f64::from(score) / 2.0, cap),
        };
        self.known[id as usize] = Some(Box::new(table));
        true
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
        let natural = self.trace.is_natural(row);
        if natural {
            self.finished += 1;
            self.finished_tokens += u64::from(tokens);
        }
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
        if !natural || !self.spec.rls || self.earlier(id).is_some() {
            return Ok(());
        }
        for kind in Kind::ALL {
            if kind == Kind::Text && !self.predicted.is_read(id as usize) {
                continue;
            }
            if let Some(own) = self.readouts[kind as usize].as_mut() {
                self.trace.with_row(kind, row, |features| own.observe(features, label)).transpose()?;
            }
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
                let predicted = Kind::ALL.iter().any(|&readout| !self.predicted.get(readout, id as usize).is_nan());
                let says = predicted || self.trace.settled(row).is_some();
                let known = self.known.get(id as usize)?.as_ref().filter(|_| says)?;
                Some(Arc::clone(known.length()))
            }
        }
    }

    /// Tokens that a request stops at, at the latest: its own limit. M is none, an answer may be longer.
    pub fn limit_of(&self, id: u32) -> u32 {
        self.trace.max_tokens.as_ref().map_or(u32::MAX, |limits| limits[self.row(id)].max(1))
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

fn in_row(column: &str, row: usize, error: Error) -> Error {
    match error {
        Error::Readout(text) => Error::Readout(format!("column {column}, row {row}: {text}")),
        other => other,
    }
}
