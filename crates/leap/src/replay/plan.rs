//! Which policies a trace allows, and the readouts that they start from.

use super::options::Options;
use super::policy::{PolicySpec, Rule};
use super::ranker::Readouts;
use super::trace::{Features, Trace};
use crate::online::{OnlineOptions, OnlineReadout};
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
    let any = |rule: fn(&PolicySpec) -> bool| specs.iter().any(rule);
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
        OnlineReadout::from_zero(d, budget, lam, WARMUP, kind, OnlineOptions::default())
    };
    if trace.prompt_features.is_none() && all.prompt.as_ref().is_some_and(|readout| readout.d() != 3) {
        notes.push("the trace has no prompt_features: the prompt readout given is not used".into());
        all.prompt = None;
    }
    if all.prompt.is_none() && any(|spec| spec.rule == Rule::Leap) {
        let width = trace.prompt_features.as_ref().map_or(3, Features::width);
        all.prompt = Some(zero(Kind::Prompt, width)?);
        let what = if trace.prompt_features.is_some() { "prompt features" } else { "prompt length alone" };
        notes.push(format!("leap: the prompt readout learns from zero, on {what}"));
    }
    if let (None, Some(features), true) = (&all.state, &trace.features, any(PolicySpec::has_readout)) {
        all.state = Some(zero(Kind::State, features.width())?);
        notes.push("leap: the state readout learns from zero".into());
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
        let spec: PolicySpec = text.parse()?;
        spec.scores(trace)?;
        let paper = matches!(spec.rule, Rule::LeapPaper | Rule::LeapFrozen);
        if paper && trace.features.is_none() {
            notes.push(format!("{spec} is left out: the trace has no column features"));
        } else if spec.rule == Rule::LeapFrozen && readouts.state.is_none() {
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
