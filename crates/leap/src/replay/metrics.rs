//! What a simulated run amounts to: latencies from the planned arrival, throughput, who pays, and how good the
//! predictions were. Each latency is one small object with its unit and formula; names and definitions are those of
//! `vllm bench serve`, with PTL beside them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::config::EngineConfig;
use super::cost::CostModel;
use super::outcome::{Outcome, Record};
use super::policy::{PolicySpec, Rule};
use super::trace::{Trace, are_lengths};
use crate::readout::Kind;
use crate::stats;

/// A latency of one request.
struct Latency {
    name: &'static str,
    /// Seconds of a finished request; `None` where the latency is not defined.
    of: fn(&Record, u32) -> Option<f64>,
}

const LATENCIES: [Latency; 4] = [
    // Per-token latency: from planned arrival to completion, by output token.
    Latency { name: "ptl", of: |r, output| Some((r.finish_s - r.arrival_s) / f64::from(output)) },
    // Time to first token.
    Latency { name: "ttft", of: |r, _| Some(r.first_token_s - r.arrival_s) },
    // Time per output token after the first.
    Latency {
        name: "tpot",
        of: |r, output| (output > 1).then(|| (r.finish_s - r.first_token_s) / f64::from(output - 1)),
    },
    // End-to-end latency.
    Latency { name: "e2el", of: |r, _| Some(r.finish_s - r.arrival_s) },
];

/// Bounds in milliseconds that a good request keeps; absent ones do not bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Goodput {
    /// Bound on TTFT.
    pub ttft: Option<f64>,
    /// Bound on TPOT; a one-token answer counts as 0.
    pub tpot: Option<f64>,
    /// Bound on E2EL.
    pub e2el: Option<f64>,
    /// Bound on PTL.
    pub ptl: Option<f64>,
}

impl Goodput {
    fn is_set(&self) -> bool {
        [self.ttft, self.tpot, self.e2el, self.ptl].iter().any(Option::is_some)
    }

    fn holds(&self, record: &Record, output: u32) -> bool {
        LATENCIES.iter().all(|latency| {
            let bound = match latency.name {
                "ptl" => self.ptl,
                "ttft" => self.ttft,
                "tpot" => self.tpot,
                _ => self.e2el,
            };
            bound.is_none_or(|bound| 1e3 * (latency.of)(record, output).unwrap_or(0.0) <= bound)
        })
    }
}

/// One number, where it is defined.
pub type Summary = Option<f64>;

/// The requests of one quartile of true length.
#[derive(Clone, Debug, PartialEq)]
pub struct Quartile {
    /// Longest output in it, in tokens.
    pub max_output_tokens: u32,
    /// Requests in it.
    pub requests: usize,
    /// Mean E2EL in milliseconds.
    pub mean_e2el_ms: Summary,
    /// Mean PTL in milliseconds.
    pub mean_ptl_ms: Summary,
}

/// How well lengths were predicted before anything of the answer was known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Rank correlation with the true lengths.
    pub spearman: Summary,
    /// The same by pairs, ties corrected.
    pub kendall_tau_b: Summary,
    /// Mean absolute error in tokens.
    pub mae_tokens: Summary,
}

/// One run in numbers.
#[derive(Clone, Debug, Default)]
pub struct RunMetrics {
    /// Numbers by vLLM's key.
    pub metrics: BTreeMap<String, Summary>,
    /// By quartile of true length.
    pub by_quartile: Vec<Quartile>,
    /// Queue, preemptions, caps.
    pub queue: BTreeMap<&'static str, Summary>,
    /// The best prediction made of each request.
    pub prediction: Option<Prediction>,
    /// Those of each [`Kind`] of readout that the policy goes by.
    pub by_readout: [Option<Prediction>; 3],
}

/// Longest outputs of the quartiles of a trace; fewer than four where lengths are equal.
pub fn quartiles(trace: &Trace, rows: &[u32]) -> Vec<u32> {
    let mut lengths: Vec<u32> = rows.iter().map(|&row| trace.output_tokens[row as usize]).collect();
    lengths.sort_unstable();
    // Lengths that occur, so that no quartile is empty.
    let mut bounds: Vec<u32> =
        (1..=4).filter_map(|q| lengths.get((q * lengths.len()).div_ceil(4).checked_sub(1)?).copied()).collect();
    bounds.dedup();
    bounds
}

/// What to compute of a run.
pub struct Measure<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// The engine that ran it.
    pub config: &'a EngineConfig,
    /// Percentiles to give, from 0 to 100.
    pub percentiles: &'a [f64],
    /// Bounds of a good request.
    pub goodput: Goodput,
    /// From [`quartiles`].
    pub quartiles: &'a [u32],
}

impl Measure<'_> {
    /// The numbers of one run.
    pub fn of(&self, spec: &PolicySpec, outcome: &Outcome) -> RunMetrics {
        let mut run = RunMetrics::default();
        let records = &outcome.records;
        let output = |record: &Record| self.trace.output_tokens[record.row as usize];
        for latency in &LATENCIES {
            let mut ms: Vec<f64> =
                records.iter().filter_map(|record| (latency.of)(record, output(record))).map(|s| 1e3 * s).collect();
            ms.sort_by(f64::total_cmp);
            let mut put = |what: &str, value: Summary| {
                run.metrics.insert(format!("{what}_{}_ms", latency.name), value);
            };
            put("mean", stats::mean(&ms));
            put("median", stats::percentile(&ms, 50.0));
            put("std", stats::std_pop(&ms));
            for &p in self.percentiles {
                put(&format!("p{p}"), stats::percentile(&ms, p));
            }
        }
        let gap = |value: Option<f64>| value.map(|s| 1e3 * s);
        run.metrics.insert("mean_itl_ms".into(), gap(outcome.gaps.mean()));
        run.metrics.insert("median_itl_ms".into(), gap(outcome.gaps.percentile(50.0)));
        run.metrics.insert("std_itl_ms".into(), gap(outcome.gaps.std()));
        for &p in self.percentiles {
            run.metrics.insert(format!("p{p}_itl_ms"), gap(outcome.gaps.percentile(p)));
        }
        self.put_rates(&mut run, outcome);
        self.put_quartiles(&mut run, records);
        self.put_predictions(&mut run, spec, records);
        run
    }

    fn put_rates(&self, run: &mut RunMetrics, outcome: &Outcome) {
        let records = &outcome.records;
        let duration = records.iter().map(|r| r.finish_s).fold(0.0, f64::max);
        let total = |tokens: fn(&Trace, usize) -> u32| -> f64 {
            records.iter().map(|r| f64::from(tokens(self.trace, r.row as usize))).sum()
        };
        let output = total(|trace, row| trace.output_tokens[row]);
        let input = total(|trace, row| trace.prompt_tokens[row]);
        let rate = |count: f64| (duration > 0.0).then(|| count / duration);
        let cost: &CostModel = &self.config.cost;
        let slowdown = records
            .iter()
            .map(|r| {
                let row = r.row as usize;
                let (prompt, output) = (self.trace.prompt_tokens[row], self.trace.output_tokens[row]);
                (r.finish_s - r.arrival_s) / cost.alone_s(prompt, output, self.config.max_num_batched_tokens)
            })
            .fold(f64::NAN, f64::max);
        let mut put = |key: &str, value: Summary| {
            run.metrics.insert(key.into(), value);
        };
        put("completed", Some(records.len() as f64));
        put("duration", Some(duration));
        put("request_throughput", rate(records.len() as f64));
        put("output_throughput", rate(output));
        put("total_token_throughput", rate(output + input));
        put("max_slowdown", slowdown.is_finite().then_some(slowdown));
        if self.goodput.is_set() {
            let good =
                records.iter().filter(|r| self.goodput.holds(r, self.trace.output_tokens[r.row as usize])).count();
            put("request_goodput", rate(good as f64));
        }
        let share = |steps: u64| (outcome.steps > 0).then(|| steps as f64 / outcome.steps as f64);
        run.queue.insert("mean_waiting", rate(outcome.waited_s));
        run.queue.insert("share_of_steps_with_queue", share(outcome.steps_with_queue));
        run.queue.insert("steps", Some(outcome.steps as f64));
        run.queue.insert("steps_blocked_by_memory", Some(outcome.steps_blocked_by_memory as f64));
        run.queue.insert("steps_blocked_by_seats", Some(outcome.steps_blocked_by_seats as f64));
        run.queue.insert("preemptions", Some(outcome.preemptions as f64));
        run.queue.insert("computed_tokens", Some(outcome.computed_tokens as f64));
        run.queue.insert("recomputed_tokens", Some(outcome.recomputed_tokens as f64));
        run.queue.insert("admission_holds", Some(outcome.admission_holds as f64));
        run.queue.insert("kv_peak_ratio", outcome.kv_peak_ratio);
        run.queue.insert("wait_cap_promotions", Some(outcome.wait_cap_promotions as f64));
        run.queue.insert("prefix_cache_hit_tokens", Some(outcome.cached_tokens as f64));
    }

    fn put_quartiles(&self, run: &mut RunMetrics, records: &[Record]) {
        let mut sums = vec![(0_usize, 0.0, 0.0); self.quartiles.len()];
        for record in records {
            let output = self.trace.output_tokens[record.row as usize];
            let quartile = self.quartiles.partition_point(|&bound| bound < output);
            if let Some((count, e2el, ptl)) = sums.get_mut(quartile) {
                let ms = 1e3 * (record.finish_s - record.arrival_s);
                *count += 1;
                *e2el += ms;
                *ptl += ms / f64::from(output);
            }
        }
        run.by_quartile = self
            .quartiles
            .iter()
            .zip(sums)
            .map(|(&max_output_tokens, (requests, e2el, ptl))| {
                let mean = |sum: f64| (requests > 0).then(|| sum / requests as f64);
                Quartile { max_output_tokens, requests, mean_e2el_ms: mean(e2el), mean_ptl_ms: mean(ptl) }
            })
            .collect();
    }

    fn put_predictions(&self, run: &mut RunMetrics, spec: &PolicySpec, records: &[Record]) {
        let quality = |of: &dyn Fn(&Record) -> f32, are_lengths: bool| {
            let pairs: Vec<(f64, f64)> = records
                .iter()
                .filter(|record| !of(record).is_nan())
                .map(|record| (f64::from(of(record)), f64::from(self.trace.output_tokens[record.row as usize])))
                .collect();
            let (predicted, lengths): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
            let errors: Vec<f64> = pairs.iter().map(|(predicted, length)| (predicted - length).abs()).collect();
            Prediction {
                spearman: stats::spearman(&predicted, &lengths),
                kendall_tau_b: stats::kendall_tau_b(&predicted, &lengths),
                mae_tokens: stats::mean(&errors).filter(|_| are_lengths),
            }
        };
        match &spec.rule {
            Rule::SjfPrompt => {
                let prompt = |record: &Record| self.trace.prompt_tokens[record.row as usize] as f32;
                run.prediction = Some(quality(&prompt, false));
            }
            Rule::Score(name) => {
                let lengths = self.trace.score(name).is_some_and(are_lengths);
                run.prediction = Some(quality(&Record::best_predicted, lengths));
            }
            Rule::Leap | Rule::LeapPaper | Rule::LeapFrozen => {
                run.prediction = Some(quality(&Record::best_predicted, true));
                let own = |kind: Kind| quality(&|record| record.predicted[kind as usize], true);
                run.by_readout = Kind::ALL.map(|kind| spec.readouts.has(kind).then(|| own(kind)));
            }
            _ => {}
        }
    }
}
