//! Which policies a trace allows, and the readouts that they start from.

use super::options::Options;
use super::policy::{PolicySpec, Rule};
use super::readouts::Readouts;
use super::trace::Trace;
use crate::online::{OnlineOptions, OnlineReadout};
use crate::prompt::LENGTH_FEATURES;
use crate::readout::Kind;
use crate::{Error, Result};

/// Prompt rows from which a readout that starts from zero takes mean and scale.
const WARMUP: usize = 256;

/// Readouts that learn from zero where the trace has features and no fitted one was given.
pub(super) fn complete(
    readouts: &Readouts,
    trace: &Trace,
    options: &Options,
    specs: &[PolicySpec],
    notes: &mut Vec<String>,
) -> Result<Readouts> {
    let mut all = readouts.clone();
    let budget = options.output_budget(trace, readouts);
    let length_terms = trace.prompt_features.is_none();
    if length_terms && all.get(Kind::Prompt).is_some_and(|readout| readout.d() != LENGTH_FEATURES) {
        notes.push("the trace has no prompt_features: the prompt readout given is not used".into());
        all.put(Kind::Prompt, None);
    }
    for kind in Kind::ALL {
        let Some(width) = trace.width(kind) else { continue };
        if let Some(readout) = all.get(kind) {
            if readout.d() != width {
                let (column, d) = (Trace::column(kind), readout.d());
                let beside = if kind == Kind::Text { " with those of the prompt" } else { "" };
                return Err(Error::Readout(format!(
                    "column {column} has {width} features a row{beside}, the readout reads {d}"
                )));
            }
        } else if specs.iter().any(|spec| spec.readouts.has(kind)) {
            // A ridge of about twice the number of features keeps few labels from saying much, at any width.
            let lam = (2.0 * width as f64).min(1_000.0);
            let zero = OnlineReadout::from_zero(width, budget, lam, WARMUP, kind, OnlineOptions::default())?;
            all.put(kind, Some(zero));
            let what = match (kind, length_terms) {
                (Kind::Prompt, true) => ", on prompt length alone",
                (Kind::Prompt, false) => ", on prompt features",
                _ => "",
            };
            notes.push(format!("leap: the {kind} readout learns from zero{what}"));
        }
    }
    Ok(all)
}

/// The policies that can run on this trace; the others are told.
pub(super) fn usable(
    trace: &Trace,
    readouts: &Readouts,
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<PolicySpec>> {
    let mut specs = Vec::new();
    for text in &options.policies {
        let spec = text.parse::<PolicySpec>()?.over(trace)?;
        let paper = matches!(spec.rule, Rule::LeapPaper | Rule::LeapFrozen);
        if paper && trace.features.is_none() {
            notes.push(format!("{spec} is left out: the trace has no column features"));
        } else if spec.rule == Rule::LeapFrozen && readouts.get(Kind::State).is_none() {
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
