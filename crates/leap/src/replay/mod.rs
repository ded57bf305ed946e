//! Replay of a recorded trace through a step-level model of a continuous-batching engine, as vLLM V1 runs it.
//!
//! [`Trace`] holds what is known of the requests, [`EngineConfig`] and [`CostModel`] what a step does and costs,
//! [`PolicySpec`] who goes first. [`simulate`] runs one policy once, [`simulate_recorded`] at the trace's own times;
//! [`run`] runs policies, seeds and sweep points in parallel and gives one report.

mod balancer;
mod blocks;
mod client;
mod compose;
mod config;
mod cost;
mod decode;
mod encoder;
mod engine;
mod engines;
mod gaps;
mod input;
mod memory;
mod metrics;
mod observe;
mod once;
mod options;
mod outcome;
mod parts;
mod plan;
mod policy;
mod ranker;
mod ranks;
mod readouts;
mod report;
mod run;
mod running;
mod setting;
mod state;
mod steps;
mod timeline;
mod trace;
mod waiting;

pub use blocks::BlockPool;
pub use config::EngineConfig;
pub use cost::CostModel;
pub use encoder::ENCODER_BACKLOG;
pub use engines::{EnginePreset, engine_presets};
pub use input::{Arrivals, RunInput, left_out};
pub use metrics::{Goodput, RunMetrics, Summary};
pub use once::simulate_recorded;
pub use options::{Options, Point};
pub use outcome::{Control, Outcome, Record};
pub use policy::{Levers, PolicySpec, ReadoutSet, Rule};
pub use ranks::simulate;
pub use readouts::Readouts;
pub use report::{Estimate, Report};
pub use run::{RequestRow, run};
pub use steps::StepLog;
pub use timeline::Timeline;
pub use trace::{Features, Finish, Trace};
