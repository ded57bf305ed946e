//! What is known of the requests of a recorded trace, as columns.

use half::f16;
use ndarray::Array2;

use crate::online::is_settled;
use crate::prompt::{LENGTH_FEATURES, length_features};
use crate::readout::Kind;
use crate::rows::Row;
use crate::{Error, Result};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By itself: its length is a label.
    Stop,
    /// At its own `max_tokens`: the length says only that the answer would have been at least as long.
    Length,
    /// Aborted or failed: no label.
    Abort,
}

/// Feature rows of a trace, one a request.
#[derive(Clone, Debug)]
pub enum Features {
    /// Half precision.
    F16(Array2<f16>),
    /// Single precision.
    F32(Array2<f32>),
}

impl Features {
    /// Features a row.
    pub fn width(&self) -> usize {
        match self {
            Self::F16(rows) => rows.ncols(),
            Self::F32(rows) => rows.ncols(),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(rows) => rows.nrows(),
            Self::F32(rows) => rows.nrows(),
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One row.
    pub fn row(&self, row: usize) -> Row<'_> {
        match self {
            Self::F16(rows) => {
                let width = rows.ncols();
                Row::F16(&rows.as_slice().unwrap_or_default()[row * width..(row + 1) * width])
            }
            Self::F32(rows) => {
                let width = rows.ncols();
                Row::F32(&rows.as_slice().unwrap_or_default()[row * width..(row + 1) * width])
            }
        }
    }

    fn is_contiguous(&self) -> bool {
        match self {
            Self::F16(rows) => rows.is_standard_layout(),
            Self::F32(rows) => rows.is_standard_layout(),
        }
    }
}

/// Whether another predictor's scores can be lengths in tokens, not just ranks.
pub(super) fn are_lengths(scores: &[f32]) -> bool {
    scores.iter().all(|&score| score > 0.0)
}

/// A recorded trace. Every column has one entry a request, in order of arrival.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Planned arrival in seconds from the start, ascending.
    pub arrival_s: Vec<f64>,
    /// Prompt length in tokens, at least 1.
    pub prompt_tokens: Vec<u32>,
    /// Output length in tokens, at least 1.
    pub output_tokens: Vec<u32>,
    /// The request's own output limit.
    pub max_tokens: Option<Vec<u32>>,
    /// How each request ended; absent means all by themselves.
    pub finish: Option<Vec<Finish>>,
    /// Whether the client had forced the length, so that it is no label; absent means of none.
    pub forced: Option<Vec<bool>>,
    /// Leading prompt tokens that the engine had cached already.
    pub prefix_tokens: Option<Vec<u32>>,
    /// Hashes of each prompt's full blocks of `prefix_block_size` tokens; equal leading hashes are a shared prefix.
    pub prefix_blocks: Option<Vec<Vec<u64>>>,
    /// Tokens a block of `prefix_blocks`.
    pub prefix_block_size: u32,
    /// Hidden state of the last prompt token.
    pub features: Option<Features>,
    /// Prompt features.
    pub prompt_features: Option<Features>,
    /// A small encoder's features of the prompt's text.
    pub text_features: Option<Features>,
    /// Other predictors' scores by name, smaller = shorter.
    pub scores: Vec<(String, Vec<f32>)>,
}

impl Trace {
    /// Number of requests.
    pub fn len(&self) -> usize {
        self.arrival_s.len()
    }

    /// Whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.arrival_s.is_empty()
    }

    /// How request `row` ended.
    pub fn finish_of(&self, row: usize) -> Finish {
        self.finish.as_ref().map_or(Finish::Stop, |finish| finish[row])
    }

    fn is_forced(&self, row: usize) -> bool {
        self.forced.as_ref().is_some_and(|forced| forced[row])
    }

    /// The length of request `row`, where its client had settled it: it is known on arrival.
    ///
    /// Of what is `forced` those that ended below their limit were held up or ended by something else: nobody could know.
    pub(super) fn settled(&self, row: usize) -> Option<u32> {
        let output = self.output_tokens[row];
        let Some(limits) = &self.max_tokens else { return self.is_forced(row).then_some(output) };
        let limit = limits[row].max(1);
        let settled = is_settled(u64::from(limit), 0, false) || (self.is_forced(row) && output >= limit);
        settled.then_some(limit)
    }

    /// Whether the length of request `row` says something of natural ones, had it not been aborted.
    pub(super) fn is_natural(&self, row: usize) -> bool {
        !self.is_forced(row) && self.settled(row).is_none()
    }

    /// The scores of a predictor.
    pub fn score(&self, name: &str) -> Option<&[f32]> {
        self.scores.iter().find(|(known, _)| known == name).map(|(_, values)| values.as_slice())
    }

    /// The column of a kind of readout.
    pub(super) fn column(kind: Kind) -> &'static str {
        match kind {
            Kind::Prompt => "prompt_features",
            Kind::Text => "text_features",
            Kind::State => "features",
        }
    }

    fn features_of(&self, kind: Kind) -> Option<&Features> {
        match kind {
            Kind::Prompt => self.prompt_features.as_ref(),
            Kind::Text => self.text_features.as_ref(),
            Kind::State => self.features.as_ref(),
        }
    }

    /// Features that a readout of a kind finds of a request; `None` where the trace has none for it.
    pub(super) fn width(&self, kind: Kind) -> Option<usize> {
        let own = self.features_of(kind).map(Features::width);
        let before = || self.prompt_features.as_ref().map_or(LENGTH_FEATURES, Features::width);
        match kind {
            Kind::Prompt => Some(before()),
            Kind::Text => own.map(|width| width + before()),
            Kind::State => own,
        }
    }

    /// Hands on what a readout of a kind reads of a request, where the trace has it. Without prompt features their length
    /// terms stand for them; a text readout reads both.
    pub(super) fn with_row<T>(&self, kind: Kind, row: usize, act: impl FnOnce(Row<'_>) -> T) -> Option<T> {
        let own = self.features_of(kind).map(|features| features.row(row));
        let terms = || length_features(self.prompt_tokens[row]);
        match (kind, own) {
            (Kind::Prompt, None) => Some(act(Row::F32(&terms()))),
            (Kind::Text, Some(text)) => {
                let mut joined = text.to_f32_vec();
                match &self.prompt_features {
                    Some(features) => joined.extend(features.row(row).to_f32_vec()),
                    None => joined.extend(terms()),
                }
                Some(act(Row::F32(&joined)))
            }
            (_, own) => own.map(act),
        }
    }

    /// Checks that the columns fit each other and can be replayed.
    ///
    /// # Errors
    /// [`Error::Trace`] names the column and the first bad row (counted from 0).
    pub fn check(&self) -> Result<()> {
        let n = self.len();
        if n == 0 {
            return Err(Error::Trace("the trace has no requests".into()));
        }
        let lengths = [
            ("prompt_tokens", Some(self.prompt_tokens.len())),
            ("output_tokens", Some(self.output_tokens.len())),
            ("max_tokens", self.max_tokens.as_ref().map(Vec::len)),
            ("finish_reason", self.finish.as_ref().map(Vec::len)),
            ("forced", self.forced.as_ref().map(Vec::len)),
            ("prefix_tokens", self.prefix_tokens.as_ref().map(Vec::len)),
            ("prefix_blocks", self.prefix_blocks.as_ref().map(Vec::len)),
        ];
        let features = Kind::ALL.map(|kind| (Self::column(kind), self.features_of(kind).map(Features::len)));
        let scores = self.scores.iter().map(|(name, values)| (name.as_str(), Some(values.len())));
        for (column, length) in lengths.into_iter().chain(features).chain(scores) {
            if let Some(length) = length.filter(|&length| length != n) {
                return Err(Error::Trace(format!("column {column} has {length} rows, arrival_s has {n}")));
            }
        }
        for kind in Kind::ALL {
            if self.features_of(kind).is_some_and(|features| !features.is_contiguous()) {
                let column = Self::column(kind);
                return Err(Error::Trace(format!("column {column} must be contiguous in memory")));
            }
        }
        let mut before = 0.0;
        for row in 0..n {
            let arrival = self.arrival_s[row];
            if !arrival.is_finite() || arrival < 0.0 {
                return Err(Error::Trace(format!("column arrival_s, row {row}: {arrival} is no time")));
            }
            if arrival < before {
                return Err(Error::Trace(format!("column arrival_s, row {row}: {arrival} is before row {}", row - 1)));
            }
            before = arrival;
            for (column, values) in [("prompt_tokens", &self.prompt_tokens), ("output_tokens", &self.output_tokens)] {
                if values[row] == 0 {
                    return Err(Error::Trace(format!("column {column}, row {row}: must be at least 1")));
                }
            }
            if u64::from(self.prompt_tokens[row]) + u64::from(self.output_tokens[row]) > u64::from(u32::MAX / 2) {
                return Err(Error::Trace(format!("row {row}: prompt and output are too long to count")));
            }
        }
        for (name, values) in &self.scores {
            if let Some(row) = values.iter().position(|value| !value.is_finite()) {
                return Err(Error::Trace(format!("column score_{name}, row {row}: {} is no score", values[row])));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Trace;

    #[test]
    fn a_settled_length_is_one_that_its_client_could_tell_on_arrival() {
        // Tokens, limit and whether forced; the length that was settled, and whether it is that of a natural answer.
        let cases = [
            (5, 9, false, None, true),
            (9, 9, false, None, true),
            (9, 9, true, Some(9), false),
            // Held up by a least length: no label, and nobody could know.
            (5, 9, true, None, false),
            (1, 1, false, Some(1), false),
        ];
        let trace = Trace {
            output_tokens: cases.map(|case| case.0).to_vec(),
            max_tokens: Some(cases.map(|case| case.1).to_vec()),
            forced: Some(cases.map(|case| case.2).to_vec()),
            ..Trace::default()
        };
        let unlimited = Trace { max_tokens: None, ..trace.clone() };
        for (row, (output, _, forced, settled, natural)) in cases.into_iter().enumerate() {
            assert_eq!((trace.settled(row), trace.is_natural(row)), (settled, natural), "row {row}");
            assert_eq!((unlimited.settled(row), unlimited.is_natural(row)), (forced.then_some(output), !forced));
        }
    }
}
