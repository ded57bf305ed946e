use crate::error::to_py;
use leap::levers::select_by_remaining;
use leap::remaining::{Objective, Order, RemainingTable, remaining_many};
use numpy::{AllowTypeChange, IntoPyArray, PyArray1, PyArrayLikeDyn};
use pyo3::exceptions::{PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// One or many numbers, in f64 whatever they came in.
fn numbers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let array: PyArrayLikeDyn<'_, f64, AllowTypeChange> = value.extract()?;
    let view = array.as_array();
    if view.ndim() > 1 {
        let text = format!("{name}: expected a number or one dimension, got {}", view.ndim());
        return Err(to_py(leap::Error::Config(text)));
    }
    Ok(view.iter().copied().collect())
}

/// Counts of steps; read as f64 so that a negative one is seen and not wrapped.
pub fn counts(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let whole = |(i, x): (usize, f64)| {
        let fits = x >= 0.0 && x <= f64::from(u32::MAX) && x.fract() == 0.0;
        fits.then_some(x as u32).ok_or_else(|| {
            to_py(leap::Error::Config(format!("{name}[{i}]: expected a whole number of at least 0, got {x}")))
        })
    };
    numbers(name, value)?.into_iter().enumerate().map(whole).collect()
}

#[pyfunction]
#[pyo3(signature = (score, noise, generated, cap, *, kind = "survival", objective = "ptl"))]
fn remaining<'py>(
    py: Python<'py>,
    score: &Bound<'py, PyAny>,
    noise: &Bound<'py, PyAny>,
    generated: &Bound<'py, PyAny>,
    cap: &Bound<'py, PyAny>,
    kind: &str,
    objective: &str,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let order: Order = kind.parse().map_err(to_py)?;
    let objective: Objective = objective.parse().map_err(to_py)?;
    let (score, noise) = (numbers("score", score)?, numbers("noise", noise)?);
    let (generated, cap) = (numbers("generated", generated)?, numbers("cap", cap)?);
    let tokens = py.detach(|| remaining_many(order, objective, &score, &noise, &generated, &cap)).map_err(to_py)?;
    Ok(tokens.into_pyarray(py))
}

/// Remaining tokens of one request by tokens generated.
#[pyclass(name = "RemainingTable", module = "leap_rs", frozen)]
pub struct PyRemainingTable {
    pub inner: RemainingTable,
    pub known: bool,
}

/// Order and objective by their names.
pub fn rule(kind: &str, objective: &str) -> PyResult<(Order, Objective)> {
    Ok((kind.parse().map_err(to_py)?, objective.parse().map_err(to_py)?))
}

fn at_least_one(name: &str, tokens: u32) -> PyResult<u32> {
    if tokens >= 1 { Ok(tokens) } else { Err(to_py(leap::Error::Config(format!("{name} is 0, must be at least 1")))) }
}

#[pymethods]
impl PyRemainingTable {
    #[new]
    #[pyo3(signature = (score, noise, cap, *, kind = "gittins", objective = "ptl"))]
    fn new(score: f32, noise: f64, cap: u32, kind: &str, objective: &str) -> PyResult<Self> {
        let (order, objective) = rule(kind, objective)?;
        let cap = at_least_one("cap", cap)?;
        if !(score.is_finite() && noise.is_finite() && noise >= 0.0) {
            let text = format!("score is {score}, noise {noise}: must be finite, and noise at least 0");
            return Err(to_py(leap::Error::Config(text)));
        }
        Ok(Self { inner: RemainingTable::normal(order, objective, score, noise, cap), known: true })
    }

    #[classmethod]
    #[pyo3(signature = (length, *, kind = "gittins", objective = "ptl"))]
    fn of_length(_class: &Bound<'_, PyType>, length: u32, kind: &str, objective: &str) -> PyResult<Self> {
        let (order, objective) = rule(kind, objective)?;
        let length = at_least_one("length", length)?;
        Ok(Self { inner: RemainingTable::of_length(order, objective, length), known: true })
    }

    fn remaining(&self, generated: u32) -> f64 {
        self.inner.remaining(generated)
    }

    fn mean_remaining(&self, generated: u32) -> f64 {
        self.inner.mean_remaining(generated)
    }

    fn next_rekey(&self, generated: u32) -> u32 {
        self.inner.next_rekey(generated)
    }

    #[getter]
    fn score(&self) -> f32 {
        self.inner.score()
    }

    #[getter]
    fn cap(&self) -> u32 {
        self.inner.cap()
    }

    #[getter]
    fn known(&self) -> bool {
        self.known
    }
}

#[pyfunction]
#[pyo3(signature = (remaining, arrival_s, steps_waited, slots, *, aging_rate, wait_cap_steps))]
fn select_slots<'py>(
    py: Python<'py>,
    remaining: &Bound<'py, PyAny>,
    arrival_s: &Bound<'py, PyAny>,
    steps_waited: &Bound<'py, PyAny>,
    slots: usize,
    aging_rate: f64,
    wait_cap_steps: Option<u32>,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let (remaining, arrival) = (numbers("remaining", remaining)?, numbers("arrival_s", arrival_s)?);
    let waited = counts("steps_waited", steps_waited)?;
    let chosen = py.detach(|| select_by_remaining(&remaining, &arrival, &waited, slots, aging_rate, wait_cap_steps));
    Ok(chosen.map_err(to_py)?.into_pyarray(py))
}

#[pyfunction]
#[pyo3(signature = (remaining, aging_rate, arrival_s, *, memory_weight = 0.0, memory_tokens = 1.0))]
fn static_key(remaining: f64, aging_rate: f64, arrival_s: f64, memory_weight: f64, memory_tokens: f64) -> f64 {
    leap::queue::static_key(remaining, aging_rate, arrival_s, memory_weight, memory_tokens)
}

#[pyclass(module = "leap_rs")]
struct AgingQueue {
    queue: leap::queue::AgingQueue,
}

#[pymethods]
impl AgingQueue {
    #[new]
    #[pyo3(signature = (aging_rate, *, memory_weight = 0.0, wait_cap_s = None))]
    fn new(aging_rate: f64, memory_weight: f64, wait_cap_s: Option<f64>) -> PyResult<Self> {
        let queue = leap::queue::AgingQueue::new(aging_rate)
            .and_then(|queue| queue.with_memory_weight(memory_weight))
            .and_then(|queue| queue.with_wait_cap_s(wait_cap_s));
        Ok(Self { queue: queue.map_err(to_py)? })
    }

    #[pyo3(signature = (id, remaining, arrival_s, *, memory_tokens = 1.0, queued_s = None))]
    fn push(
        &mut self,
        id: u64,
        remaining: f64,
        arrival_s: f64,
        memory_tokens: f64,
        queued_s: Option<f64>,
    ) -> PyResult<()> {
        let queued_s = queued_s.unwrap_or(arrival_s);
        self.queue.push_queued(id, remaining, arrival_s, memory_tokens, queued_s).map_err(to_py)
    }

    #[pyo3(signature = (now_s = None))]
    fn pop(&mut self, now_s: Option<f64>) -> PyResult<u64> {
        let first = match now_s {
            Some(now) => self.queue.pop_at(now),
            None => self.queue.pop(),
        };
        first.ok_or_else(|| PyIndexError::new_err("pop from an empty queue"))
    }

    #[pyo3(signature = (now_s = None))]
    fn peek(&self, now_s: Option<f64>) -> PyResult<u64> {
        let first = match now_s {
            Some(now) => self.queue.peek_at(now),
            None => self.queue.peek(),
        };
        first.ok_or_else(|| PyIndexError::new_err("peek into an empty queue"))
    }

    fn head(&self, now_s: f64) -> PyResult<(u64, bool, bool)> {
        let head = self.queue.head(now_s).ok_or_else(|| PyIndexError::new_err("head of an empty queue"))?;
        Ok((head.id, head.overdue, head.promoted))
    }

    fn order(&self, now_s: f64) -> Vec<u64> {
        self.queue.order_at(now_s)
    }

    fn place(&self, id: u64, now_s: f64) -> PyResult<usize> {
        self.queue.place_at(id, now_s).ok_or_else(|| PyKeyError::new_err(id))
    }

    fn urgency(&self, id: u64, now_s: f64) -> PyResult<(bool, f64)> {
        let urgency = self.queue.urgency_at(id, now_s).ok_or_else(|| PyKeyError::new_err(id))?;
        Ok((urgency.overdue, urgency.at))
    }

    fn next_overdue(&self, now_s: f64) -> Option<f64> {
        self.queue.next_overdue(now_s)
    }

    fn key(&self, id: u64) -> PyResult<f64> {
        self.queue.key(id).ok_or_else(|| PyKeyError::new_err(id))
    }

    fn remove(&mut self, id: u64) -> PyResult<()> {
        if self.queue.remove(id) { Ok(()) } else { Err(PyKeyError::new_err(id)) }
    }

    #[pyo3(signature = (id, remaining, *, memory_tokens = None))]
    fn rekey(&mut self, id: u64, remaining: f64, memory_tokens: Option<f64>) -> PyResult<()> {
        let known = match memory_tokens {
            Some(memory) => self.queue.rekey_with_memory(id, remaining, memory),
            None => self.queue.rekey(id, remaining),
        };
        if known.map_err(to_py)? { Ok(()) } else { Err(PyKeyError::new_err(id)) }
    }

    fn rekey_many(&mut self, ids: Vec<u64>, remaining: Vec<f64>, memory_tokens: Vec<f64>) -> PyResult<()> {
        if ids.len() != remaining.len() || ids.len() != memory_tokens.len() {
            let (ids, remaining, memory) = (ids.len(), remaining.len(), memory_tokens.len());
            let text = format!("rekey_many: {ids} ids, {remaining} remaining and {memory} memory_tokens");
            return Err(to_py(leap::Error::Config(text)));
        }
        for ((id, remaining), memory) in ids.into_iter().zip(remaining).zip(memory_tokens) {
            if !self.queue.rekey_with_memory(id, remaining, memory).map_err(to_py)? {
                return Err(PyKeyError::new_err(id));
            }
        }
        Ok(())
    }

    #[getter]
    fn aging_rate(&self) -> f64 {
        self.queue.aging_rate()
    }

    fn __len__(&self) -> usize {
        self.queue.len()
    }

    fn __contains__(&self, id: &Bound<'_, PyAny>) -> bool {
        id.extract().is_ok_and(|id: u64| self.queue.contains(id))
    }

    fn __repr__(&self) -> String {
        format!("AgingQueue(aging_rate={}, len={})", self.queue.aging_rate(), self.queue.len())
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(remaining, m)?)?;
    m.add_function(wrap_pyfunction!(select_slots, m)?)?;
    m.add_function(wrap_pyfunction!(static_key, m)?)?;
    m.add_class::<PyRemainingTable>()?;
    m.add_class::<AgingQueue>()
}
