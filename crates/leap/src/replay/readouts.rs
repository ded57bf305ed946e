//! The readouts that runs start from, and what those of one run have predicted.

use std::cell::Cell;

use super::input::RunInput;
use super::policy::PolicySpec;
use super::trace::Trace;
use crate::Result;
use crate::online::OnlineReadout;
use crate::readout::Kind;

/// The readouts that a run starts from, by kind; each run learns on copies of its own.
#[derive(Clone, Default)]
pub struct Readouts([Option<OnlineReadout>; 3]);

impl Readouts {
    /// The readout of a kind, where there is one.
    pub fn get(&self, kind: Kind) -> Option<&OnlineReadout> {
        self.0[kind as usize].as_ref()
    }

    /// Puts one in, or takes the one of a kind out.
    pub fn put(&mut self, kind: Kind, readout: Option<OnlineReadout>) {
        self.0[kind as usize] = readout;
    }

    /// Most tokens that one of them predicts: all are fitted to one limit, the last to speak has the word.
    pub(super) fn max_tokens(&self) -> Option<u32> {
        self.0.iter().rev().flatten().map(OnlineReadout::max_tokens).next()
    }

    /// Those that a policy can use on a trace.
    pub(super) fn used_by(&self, spec: &PolicySpec, trace: &Trace) -> [Option<&OnlineReadout>; 3] {
        Kind::ALL.map(|kind| self.get(kind).filter(|_| spec.readouts.has(kind) && trace.width(kind).is_some()))
    }
}

/// Predicted tokens of each request by kind of readout, another predictor's score with those of the prompt readout; NaN
/// where nothing was known. The ranks of a deployment share them: a request that comes again may come to another rank.
pub struct Predicted {
    tokens: [Vec<Cell<f32>>; 3],
    /// Whose prompts the encoder has read.
    read: Vec<Cell<bool>>,
}

impl Predicted {
    pub fn new(spec: &PolicySpec, trace: &Trace, input: &RunInput, readouts: &Readouts) -> Result<Self> {
        let [prompt, text, state] = readouts.used_by(spec, trace).map(|readout| readout.is_some());
        let before = prompt || !spec.scores(trace)?.is_empty();
        let unknown = |there: bool| if there { vec![Cell::new(f32::NAN); input.len()] } else { Vec::new() };
        let read = if text { vec![Cell::new(false); input.len()] } else { Vec::new() };
        Ok(Self { tokens: [before, text, state].map(unknown), read })
    }

    /// Tokens that a readout, or another predictor before prefill, predicted; NaN also where it predicts nothing at all.
    pub fn get(&self, readout: Kind, id: usize) -> f32 {
        self.tokens[readout as usize].get(id).map_or(f32::NAN, Cell::get)
    }

    pub(super) fn set(&self, readout: Kind, id: u32, tokens: f32) {
        if let Some(predicted) = self.tokens[readout as usize].get(id as usize) {
            predicted.set(tokens);
        }
    }

    /// Whether `readout` predicts at all and has not predicted of `id` yet.
    pub(super) fn lacks(&self, readout: Kind, id: u32) -> bool {
        self.tokens[readout as usize].get(id as usize).is_some_and(|tokens| tokens.get().is_nan())
    }

    /// Whether the encoder has read the prompt of `id`.
    pub(super) fn is_read(&self, id: usize) -> bool {
        self.read.get(id).is_some_and(Cell::get)
    }

    pub(super) fn set_read(&self, id: u32) {
        if let Some(read) = self.read.get(id as usize) {
            read.set(true);
        }
    }

    /// Whether a readout that knows more than `readout` has predicted of `id`.
    pub(super) fn knows_better(&self, readout: Kind, id: u32) -> bool {
        Kind::ALL[readout as usize + 1..].iter().any(|&later| !self.get(later, id as usize).is_nan())
    }
}
