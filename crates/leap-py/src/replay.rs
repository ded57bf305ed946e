//! Binding of the replayer: columns in, one JSON text and plain arrays out.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::f16;
use leap::online::{OnlineOptions, OnlineReadout};
use leap::readout::{Kind, Readout};
use leap::replay::{
    Control, ENCODER_BACKLOG, EngineConfig, Features, Finish, Options, Outcome, Readouts, Record, Report, RequestRow,
    Trace, engine_presets, run, simulate_recorded,
};
use leap::rls::Anchor;
use numpy::{IntoPyArray, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{ConfigError, TraceError, to_py};

/// How often a running replay looks for signals and reports progress.
const TICK: Duration = Duration::from_millis(100);

#[pyfunction(name = "engine_presets")]
fn presets() -> PyResult<String> {
    serde_json::to_string(&engine_presets()).map_err(|error| ConfigError::new_err(error.to_string()))
}

#[pyfunction]
#[pyo3(signature = (columns, options, readouts=None, progress=None, requests=false))]
fn replay<'py>(
    py: Python<'py>,
    columns: &Bound<'py, PyDict>,
    options: &str,
    readouts: Option<BTreeMap<String, String>>,
    progress: Option<Py<PyAny>>,
    requests: bool,
) -> PyResult<(String, Option<Bound<'py, PyDict>>)> {
    let trace = trace_of(columns)?;
    let options: Options =
        serde_json::from_str(options).map_err(|error| ConfigError::new_err(format!("replay options: {error}")))?;
    let readouts = readouts_of(readouts)?;
    let (report, rows) = supervise(py, &trace, &readouts, &options, requests, progress)?;
    let text = serde_json::to_string(&report).map_err(|error| ConfigError::new_err(error.to_string()))?;
    let table = if requests { Some(table(py, &trace, &rows)?) } else { None };
    Ok((text, table))
}

#[pyfunction]
#[pyo3(signature = (columns, engine, *, policy="fcfs", readouts=None, timeline=false, steps=false))]
fn simulate<'py>(
    py: Python<'py>,
    columns: &Bound<'py, PyDict>,
    engine: &str,
    policy: &str,
    readouts: Option<BTreeMap<String, String>>,
    timeline: bool,
    steps: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let trace = trace_of(columns)?;
    let engine: EngineConfig =
        serde_json::from_str(engine).map_err(|error| ConfigError::new_err(format!("engine: {error}")))?;
    let readouts = readouts_of(readouts)?;
    let simulate = || simulate_recorded(&trace, &readouts, &engine, policy, timeline, steps);
    let outcome = py.detach(simulate).map_err(to_py)?;
    outcome_dict(py, outcome)
}

fn outcome_dict(py: Python<'_>, outcome: Outcome) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let seconds = |of: fn(&Record) -> f64| outcome.records.iter().map(of).collect::<Vec<_>>().into_pyarray(py);
    dict.set_item("admitted_s", seconds(|record| record.admitted_s))?;
    dict.set_item("first_token_s", seconds(|record| record.first_token_s))?;
    dict.set_item("finish_s", seconds(|record| record.finish_s))?;
    let preemptions: Vec<u32> = outcome.records.iter().map(|record| record.preemptions).collect();
    dict.set_item("preemptions", preemptions.into_pyarray(py))?;
    if let Some(timeline) = outcome.timeline {
        dict.set_item("timeline_s", timeline.at_s.into_pyarray(py))?;
        dict.set_item("timeline_waiting", timeline.waiting.into_pyarray(py))?;
        dict.set_item("timeline_resident", timeline.resident.into_pyarray(py))?;
        dict.set_item("timeline_kv_share", timeline.kv_share.into_pyarray(py))?;
    }
    if let Some(log) = outcome.log {
        dict.set_item("step_s", log.composed_s.into_pyarray(py))?;
        dict.set_item("step_ends", log.ends.into_pyarray(py))?;
        dict.set_item("step_requests", log.request.into_pyarray(py))?;
        dict.set_item("step_tokens", log.tokens.into_pyarray(py))?;
        dict.set_item("step_preempted_ends", log.preempted_ends.into_pyarray(py))?;
        dict.set_item("step_preempted", log.preempted.into_pyarray(py))?;
    }
    Ok(dict)
}

/// The readouts of files by kind.
fn readouts_of(files: Option<BTreeMap<String, String>>) -> PyResult<Readouts> {
    let mut readouts = Readouts::default();
    for (kind, path) in files.unwrap_or_default() {
        readouts.put(kind.parse::<Kind>().map_err(to_py)?, Some(online(path.as_ref())?));
    }
    Ok(readouts)
}

fn online(path: &Path) -> PyResult<OnlineReadout> {
    let readout = Readout::load(path).map_err(to_py)?;
    let beside = Anchor::path_for(path);
    let anchor = if beside.exists() { Some(Anchor::load(&beside).map_err(to_py)?) } else { None };
    OnlineReadout::new(readout, anchor, OnlineOptions::default()).map_err(to_py)
}

/// Runs without the GIL in a thread of its own, while this one watches for signals: Ctrl-C stops every simulation.
fn supervise(
    py: Python<'_>,
    trace: &Trace,
    readouts: &Readouts,
    options: &Options,
    requests: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<(Report, Vec<RequestRow>)> {
    let control = Control::default();
    let mut interrupted = None;
    let watcher = std::thread::current();
    let watcher = &watcher;
    let result = py.detach(|| {
        std::thread::scope(|scope| {
            let control = &control;
            let worker = scope.spawn(move || {
                let result = run(trace, readouts, options, requests, control);
                watcher.unpark();
                result
            });
            while !worker.is_finished() {
                std::thread::park_timeout(TICK);
                let told = Python::attach(|py| {
                    py.check_signals()?;
                    let total = control.total.load(Ordering::Relaxed);
                    match &progress {
                        Some(progress) if total > 0 => {
                            let share = control.finished.load(Ordering::Relaxed) as f64 / total as f64;
                            progress.call1(py, (share,)).map(drop)
                        }
                        _ => Ok(()),
                    }
                });
                if let Err(error) = told {
                    control.cancel.store(true, Ordering::Relaxed);
                    interrupted.get_or_insert(error);
                }
            }
            worker.join()
        })
    });
    if let Some(error) = interrupted {
        return Err(error);
    }
    match result {
        Ok(result) => result.map_err(to_py),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn column<'py, T: numpy::Element + Copy>(columns: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Vec<T>>> {
    let Some(value) = columns.get_item(name)? else { return Ok(None) };
    let array: PyReadonlyArray1<'py, T> =
        value.extract().map_err(|error| TraceError::new_err(format!("column {name}: {error}")))?;
    Ok(Some(array.as_array().to_vec()))
}

fn required<T: numpy::Element + Copy>(columns: &Bound<'_, PyDict>, name: &str) -> PyResult<Vec<T>> {
    column(columns, name)?.ok_or_else(|| TraceError::new_err(format!("column {name} is missing")))
}

fn features(columns: &Bound<'_, PyDict>, name: &str) -> PyResult<Option<Features>> {
    let Some(value) = columns.get_item(name)? else { return Ok(None) };
    if let Ok(rows) = value.extract::<PyReadonlyArray2<'_, f16>>() {
        return Ok(Some(Features::F16(rows.as_array().to_owned())));
    }
    let rows: PyReadonlyArray2<'_, f32> =
        value.extract().map_err(|error| TraceError::new_err(format!("column {name}: {error}")))?;
    Ok(Some(Features::F32(rows.as_array().to_owned())))
}

fn trace_of(columns: &Bound<'_, PyDict>) -> PyResult<Trace> {
    let finish = column::<u8>(columns, "finish")?.map(|codes| {
        let decode = |code: &u8| match code {
            1 => Finish::Length,
            2 => Finish::Abort,
            _ => Finish::Stop,
        };
        codes.iter().map(decode).collect()
    });
    let mut prefix_blocks = None;
    if let Some(offsets) = column::<i64>(columns, "prefix_block_offsets")? {
        let hashes = required::<u64>(columns, "prefix_block_hashes")?;
        let slice = |pair: &[i64]| {
            hashes
                .get(pair[0] as usize..pair[1] as usize)
                .map(<[u64]>::to_vec)
                .ok_or_else(|| TraceError::new_err("column prefix_blocks: offsets do not fit the hashes"))
        };
        prefix_blocks = Some(offsets.windows(2).map(slice).collect::<PyResult<_>>()?);
    }
    let mut scores = Vec::new();
    if let Some(named) = columns.get_item("scores")? {
        for (name, _) in named.cast::<PyDict>()?.iter() {
            let name: String = name.extract()?;
            scores.push((name.clone(), required(named.cast::<PyDict>()?, &name)?));
        }
    }
    let prefix_block_size = match columns.get_item("prefix_block_size")? {
        Some(size) => size.extract()?,
        None => 16,
    };
    Ok(Trace {
        arrival_s: required(columns, "arrival_s")?,
        prompt_tokens: required(columns, "prompt_tokens")?,
        output_tokens: required(columns, "output_tokens")?,
        max_tokens: column(columns, "max_tokens")?,
        finish,
        forced: column(columns, "forced")?,
        prefix_tokens: column(columns, "prefix_tokens")?,
        prefix_blocks,
        prefix_block_size,
        features: features(columns, "features")?,
        prompt_features: features(columns, "prompt_features")?,
        text_features: features(columns, "text_features")?,
        scores,
    })
}

/// One array a column, a row a finished request.
fn table<'py>(py: Python<'py>, trace: &Trace, rows: &[RequestRow]) -> PyResult<Bound<'py, PyDict>> {
    let table = PyDict::new(py);
    let put = |name: &str, array: Bound<'py, PyAny>| table.set_item(name, array);
    put("request", rows.iter().map(|r| r.record.row).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("policy", rows.iter().map(|r| r.policy as u16).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("point", rows.iter().map(|r| r.point).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("seed", rows.iter().map(|r| r.seed).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("arrival_s", rows.iter().map(|r| r.record.arrival_s).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("first_token_s", rows.iter().map(|r| r.record.first_token_s).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("finish_s", rows.iter().map(|r| r.record.finish_s).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    let output = |r: &RequestRow| trace.output_tokens[r.record.row as usize];
    put("output_tokens", rows.iter().map(output).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    put("preemptions", rows.iter().map(|r| r.record.preemptions).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    let predicted = |r: &RequestRow| r.record.best_predicted();
    put("predicted_tokens", rows.iter().map(predicted).collect::<Vec<_>>().into_pyarray(py).into_any())?;
    Ok(table)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("ENCODER_BACKLOG", ENCODER_BACKLOG)?;
    m.add_function(wrap_pyfunction!(presets, m)?)?;
    m.add_function(wrap_pyfunction!(replay, m)?)?;
    m.add_function(wrap_pyfunction!(simulate, m)?)
}
