//! The numbers of all runs in one serialisable report: means over seeds with 95 % intervals, and changes against
//! first come first served on the same seeds.

use std::collections::BTreeMap;

use serde::Serialize;

use super::metrics::{Prediction, Quartile, RunMetrics};
use super::policy::PolicySpec;
use crate::readout::Kind;
use crate::stats;

/// A mean over seeds with its 95 % interval (Student's t); null where undefined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Mean over seeds.
    pub mean: Option<f64>,
    /// 95 % interval; needs two seeds.
    pub ci95: Option<[f64; 2]>,
}

impl Estimate {
    /// The estimate from one value a seed; undefined ones are left out.
    pub fn of(values: impl IntoIterator<Item = Option<f64>>) -> Self {
        let values: Vec<f64> = values.into_iter().flatten().filter(|value| value.is_finite()).collect();
        if values.is_empty() {
            return Self::default();
        }
        let (mean, interval) = stats::mean_ci95(&values);
        Self { mean: Some(mean), ci95: interval.map(|(low, high)| [low, high]) }
    }
}

/// A request that no engine of these limits can serve.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// Row of the trace, counted from 0.
    pub row: u32,
    /// Why.
    pub reason: String,
}

/// What was replayed.
#[derive(Clone, Debug, Serialize)]
pub struct TraceReport {
    /// Requests replayed.
    pub requests: usize,
    /// Seconds between the first and the last arrival.
    pub duration_s: f64,
    /// Requests left out.
    pub left_out: Vec<LeftOut>,
}

/// One quartile of true length over seeds.
#[derive(Clone, Debug, Serialize)]
pub struct QuartileReport {
    /// Longest output in it, in tokens.
    pub max_output_tokens: u32,
    /// Requests in it, a run.
    pub requests: usize,
    /// Mean E2EL in milliseconds.
    pub mean_e2el_ms: Estimate,
    /// Mean PTL in milliseconds.
    pub mean_ptl_ms: Estimate,
}

/// Quality of predictions over seeds.
#[derive(Clone, Debug, Serialize)]
pub struct PredictionReport {
    /// Rank correlation with the true lengths.
    pub spearman: Estimate,
    /// The same by pairs, ties corrected.
    pub kendall_tau_b: Estimate,
    /// Mean absolute error in tokens.
    pub mae_tokens: Estimate,
    /// The prompt readout alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Box<PredictionReport>>,
    /// The text readout alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<Box<PredictionReport>>,
    /// The state readout alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<Box<PredictionReport>>,
}

/// One policy at one point of a sweep.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// The specification.
    pub policy: String,
    /// Index of the point.
    pub point: usize,
    /// Offered load as a multiple of the measured FCFS capacity.
    pub load: Option<f64>,
    /// Offered requests a second; null when all come at once.
    pub request_rate: Option<f64>,
    /// Runs.
    pub seeds: usize,
    /// By vLLM's key.
    pub metrics: BTreeMap<String, Estimate>,
    /// By quartile of true length.
    pub by_quartile: Vec<QuartileReport>,
    /// Queue, preemptions, caps.
    pub queue: BTreeMap<&'static str, Estimate>,
    /// Null where nothing is predicted.
    pub prediction: Option<PredictionReport>,
    /// Change against fcfs on the same seeds, in percent.
    pub paired: BTreeMap<String, Estimate>,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was replayed.
    pub trace: TraceReport,
    /// Measured FCFS capacity in requests a second, by point.
    pub capacity_rps: Vec<f64>,
    /// The policies that ran, with every option in force.
    pub policies: Vec<PolicySpec>,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// By point and policy.
    pub results: Vec<PolicyReport>,
}

fn predictions(runs: &[RunMetrics], of: impl Fn(&RunMetrics) -> Option<Prediction>) -> Option<PredictionReport> {
    let each: Vec<Prediction> = runs.iter().filter_map(of).collect();
    (!each.is_empty()).then(|| PredictionReport {
        spearman: Estimate::of(each.iter().map(|p| p.spearman)),
        kendall_tau_b: Estimate::of(each.iter().map(|p| p.kendall_tau_b)),
        mae_tokens: Estimate::of(each.iter().map(|p| p.mae_tokens)),
        prompt: None,
        text: None,
        state: None,
    })
}

const PAIRED: [&str; 6] =
    ["mean_ptl_ms", "mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "p99_ptl_ms", "request_throughput"];

impl PolicyReport {
    /// Puts the runs of one policy at one point together; `fcfs` are the same seeds first come first served.
    pub fn new(policy: String, point: usize, runs: &[RunMetrics], fcfs: Option<&[RunMetrics]>) -> Self {
        let first = runs.first().cloned().unwrap_or_default();
        let quartile = |i: usize, of: fn(&Quartile) -> Option<f64>| {
            Estimate::of(runs.iter().map(|run| run.by_quartile.get(i).and_then(of)))
        };
        let mut prediction = predictions(runs, |run| run.prediction);
        if let Some(prediction) = prediction.as_mut() {
            let own = |kind: Kind| predictions(runs, |run| run.by_readout[kind as usize]).map(Box::new);
            [prediction.prompt, prediction.text, prediction.state] = Kind::ALL.map(own);
        }
        let value = |run: &RunMetrics, key: &str| run.metrics.get(key).copied().flatten();
        let change = |(run, base): (&RunMetrics, &RunMetrics), key: &str| {
            let base = value(base, key).filter(|base| *base != 0.0)?;
            Some(100.0 * (value(run, key)? / base - 1.0))
        };
        let paired = |fcfs: &[RunMetrics]| {
            PAIRED
                .iter()
                .map(|&key| (key.to_owned(), Estimate::of(runs.iter().zip(fcfs).map(|pair| change(pair, key)))))
                .collect()
        };
        Self {
            policy,
            point,
            load: None,
            request_rate: None,
            seeds: runs.len(),
            metrics: first
                .metrics
                .keys()
                .map(|key| (key.clone(), Estimate::of(runs.iter().map(|run| value(run, key)))))
                .collect(),
            by_quartile: first
                .by_quartile
                .iter()
                .enumerate()
                .map(|(i, q)| QuartileReport {
                    max_output_tokens: q.max_output_tokens,
                    requests: q.requests,
                    mean_e2el_ms: quartile(i, |q| q.mean_e2el_ms),
                    mean_ptl_ms: quartile(i, |q| q.mean_ptl_ms),
                })
                .collect(),
            queue: first
                .queue
                .keys()
                .map(|&key| (key, Estimate::of(runs.iter().map(|run| run.queue.get(key).copied().flatten()))))
                .collect(),
            prediction,
            paired: fcfs.map(paired).unwrap_or_default(),
        }
    }
}
