use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use leap::online::{Estimate, Label, Learner, OnlineOptions, OnlineReadout};
use leap::readout::Kind;
use leap::rls::Anchor;
use leap::rows::Rows;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyType;

use crate::error::{ReadoutError, to_py};
use crate::order::{PyRemainingTable, counts, rule};
use crate::readout::{Features, Pit, PyReadout, numbers, pit, same_number};

fn options(batch: usize, forgetting: f64, dtype: &str) -> PyResult<OnlineOptions> {
    Ok(OnlineOptions { batch, forgetting, precision: dtype.parse().map_err(to_py)? })
}

/// Labels of whole tokens; every row is checked before any is learned.
fn labels(rows: &Rows, d: usize, lengths: &[f64], censored: Option<Vec<bool>>) -> leap::Result<Vec<Label>> {
    let refuse = |text: String| Err(leap::Error::Readout(text));
    if rows.nrows() != lengths.len() || censored.as_ref().is_some_and(|c| c.len() != lengths.len()) {
        let c = censored.map_or_else(String::new, |c| format!(", {} marks of censoring", c.len()));
        return refuse(format!("{} rows of features, {} lengths{c}", rows.nrows(), lengths.len()));
    }
    let mut out = Vec::with_capacity(lengths.len());
    for (i, &length) in lengths.iter().enumerate() {
        rows.row(i)?.check(i, d)?;
        if !(length >= 1.0 && length <= f64::from(u32::MAX) && length.fract() == 0.0) {
            return refuse(format!("row {i}: the length is {length}, must be a whole number of at least 1 token"));
        }
        let tokens = length as u32;
        out.push(if censored.as_ref().is_some_and(|c| c[i]) { Label::Censored(tokens) } else { Label::Exact(tokens) });
    }
    Ok(out)
}

/// Tokens of a score on the sqrt scale.
fn tokens(scores: Vec<f32>, max_tokens: u32) -> Vec<f32> {
    scores.into_iter().map(|s| (s * s).clamp(1.0, max_tokens as f32)).collect()
}

fn flags(censored: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<bool>>> {
    let bools = |c: &Bound<'_, PyAny>| -> PyResult<Vec<bool>> {
        let array = c.py().import("numpy")?.call_method1("asarray", (c, "bool"))?;
        array.call_method0("tolist")?.extract().map_err(|_| ReadoutError::new_err("censored must be one-dimensional"))
    };
    censored.map(bools).transpose()
}

#[pyclass(name = "OnlineReadout", module = "leap_rs", frozen)]
pub struct PyOnlineReadout {
    inner: Mutex<OnlineReadout>,
}

impl PyOnlineReadout {
    fn lock(&self) -> MutexGuard<'_, OnlineReadout> {
        // The core changes nothing where it fails, so what a panicking thread left behind is whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, waited for without the GIL: an update may hold it for long.
    fn attached(&self, py: Python<'_>) -> MutexGuard<'_, OnlineReadout> {
        self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    fn scores(&self, py: Python<'_>, features: &Bound<'_, PyAny>) -> PyResult<(Vec<f32>, u32)> {
        let features = Features::new(features)?;
        let rows = features.rows()?;
        py.detach(|| {
            let mut online = self.lock();
            for i in 0..rows.nrows() {
                rows.row(i)?.check(i, online.d())?;
            }
            let scores = (0..rows.nrows()).map(|i| online.estimate(rows.row(i)?).map(|e: Estimate| e.score));
            Ok((scores.collect::<leap::Result<_>>()?, online.max_tokens()))
        })
        .map_err(to_py)
    }
}

#[pymethods]
impl PyOnlineReadout {
    #[new]
    #[pyo3(signature = (readout, *, batch=8, forgetting=1.0, dtype="float32", anchor=None))]
    fn new(
        py: Python<'_>,
        readout: &Bound<'_, PyReadout>,
        batch: usize,
        forgetting: f64,
        dtype: &str,
        anchor: Option<PathBuf>,
    ) -> PyResult<Self> {
        let options = options(batch, forgetting, dtype)?;
        let readout = readout.get();
        let inner = py.detach(|| {
            let anchor = match anchor {
                Some(path) => Some(Anchor::load(&path)?),
                None => readout.anchor()?,
            };
            OnlineReadout::new(readout.inner.clone(), anchor, options)
        });
        Ok(Self { inner: Mutex::new(inner.map_err(to_py)?) })
    }

    #[classmethod]
    #[pyo3(signature = (d, *, max_tokens, warmup=256, lam=1000.0, kind="state", batch=8, forgetting=1.0, dtype="float32"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    fn from_zero(
        _class: &Bound<'_, PyType>,
        d: usize,
        max_tokens: u32,
        warmup: usize,
        lam: f64,
        kind: &str,
        batch: usize,
        forgetting: f64,
        dtype: &str,
    ) -> PyResult<Self> {
        let kind: Kind = kind.parse().map_err(to_py)?;
        let options = options(batch, forgetting, dtype)?;
        let inner = OnlineReadout::from_zero(d, max_tokens, lam, warmup, kind, options).map_err(to_py)?;
        Ok(Self { inner: Mutex::new(inner) })
    }

    fn score<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(self.scores(py, features)?.0.into_pyarray(py))
    }

    fn predict<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let (scores, max_tokens) = self.scores(py, features)?;
        Ok(tokens(scores, max_tokens).into_pyarray(py))
    }

    #[pyo3(signature = (features, lengths, censored=None))]
    fn observe(
        &self,
        py: Python<'_>,
        features: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        censored: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (features, lengths, censored) = (Features::new(features)?, numbers(lengths, "lengths")?, flags(censored)?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        py.detach(|| {
            let mut online = self.lock();
            let labels = labels(&rows, online.d(), lengths, censored)?;
            let mut applied = 0;
            for (i, label) in labels.into_iter().enumerate() {
                applied += online.observe(rows.row(i)?, label)?;
            }
            Ok(applied)
        })
        .map_err(to_py)
    }

    fn flush(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.lock().flush()).map_err(to_py)
    }

    fn readout(&self, py: Python<'_>) -> PyResult<PyReadout> {
        self.attached(py).readout().map(PyReadout::bare).map_err(to_py)
    }

    fn noise(&self, py: Python<'_>, score: f64) -> f64 {
        self.attached(py).noise().sigma(score)
    }

    fn pit<'py>(
        &self,
        py: Python<'py>,
        features: &Bound<'py, PyAny>,
        lengths: &Bound<'py, PyAny>,
    ) -> PyResult<Pit<'py>> {
        let (features, lengths) = (Features::new(features)?, numbers(lengths, "lengths")?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        let ranges = py.detach(|| {
            same_number(&rows, lengths)?;
            let mut online = self.lock();
            let place = |(i, &length)| online.pit(rows.row(i)?, length);
            lengths.iter().enumerate().map(place).collect::<leap::Result<_>>()
        });
        Ok(pit(py, ranges.map_err(to_py)?))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.lock().save(&path)).map_err(to_py)
    }

    #[classmethod]
    fn load(_class: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| OnlineReadout::load(&path)).map_err(to_py)?;
        Ok(Self { inner: Mutex::new(inner) })
    }

    #[getter]
    fn d(&self, py: Python<'_>) -> usize {
        self.attached(py).d()
    }

    #[getter]
    fn max_tokens(&self, py: Python<'_>) -> u32 {
        self.attached(py).max_tokens()
    }

    #[getter]
    fn anchored(&self, py: Python<'_>) -> bool {
        self.attached(py).anchored()
    }

    #[getter]
    fn known(&self, py: Python<'_>) -> bool {
        self.attached(py).known()
    }

    #[getter]
    fn updates(&self, py: Python<'_>) -> u64 {
        self.attached(py).updates()
    }

    #[getter]
    fn waiting(&self, py: Python<'_>) -> usize {
        self.attached(py).waiting()
    }
}

/// An online readout with a thread of its own: predicting never waits for an update.
#[pyclass(name = "Learner", module = "leap_rs", frozen)]
pub struct PyLearner {
    inner: Learner,
    d: usize,
    max_tokens: u32,
}

impl PyLearner {
    fn scores(&self, py: Python<'_>, features: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
        let features = Features::new(features)?;
        let rows = features.rows()?;
        let shared = self.inner.shared();
        let scores = || -> leap::Result<Vec<f32>> {
            (0..rows.nrows()).map(|i| shared.estimate(rows.row(i)?).map(|e| e.score)).collect()
        };
        py.detach(scores).map_err(to_py)
    }
}

#[pymethods]
impl PyLearner {
    #[new]
    #[pyo3(signature = (online, *, capacity=1024))]
    fn new(online: &Bound<'_, PyOnlineReadout>, capacity: usize) -> PyResult<Self> {
        let online = online.get().attached(online.py()).clone();
        let (d, max_tokens) = (online.d(), online.max_tokens());
        Ok(Self { inner: Learner::start(online, capacity).map_err(to_py)?, d, max_tokens })
    }

    fn score<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(self.scores(py, features)?.into_pyarray(py))
    }

    fn predict<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(tokens(self.scores(py, features)?, self.max_tokens).into_pyarray(py))
    }

    #[pyo3(signature = (features, caps, *, kind="gittins", objective="ptl", seen=false))]
    fn tables(
        &self,
        py: Python<'_>,
        features: &Bound<'_, PyAny>,
        caps: &Bound<'_, PyAny>,
        kind: &str,
        objective: &str,
        seen: bool,
    ) -> PyResult<Vec<PyRemainingTable>> {
        let (order, objective) = rule(kind, objective)?;
        let (features, caps) = (Features::new(features)?, counts("caps", caps)?);
        let rows = features.rows()?;
        let shared = self.inner.shared();
        let one = |(i, &cap): (usize, &u32)| {
            let (estimate, inner) = shared.table(rows.row(i)?, cap, order, objective, !seen)?;
            Ok(PyRemainingTable { inner, known: estimate.known })
        };
        let all = || {
            if rows.nrows() != caps.len() {
                let text = format!("{} rows of features, {} caps", rows.nrows(), caps.len());
                return Err(leap::Error::Readout(text));
            }
            caps.iter().enumerate().map(one).collect::<leap::Result<_>>()
        };
        // One row takes microseconds; to get the GIL back from another thread may take milliseconds.
        let tables = if caps.len() == 1 { all() } else { py.detach(all) };
        tables.map_err(to_py)
    }

    #[pyo3(signature = (features, lengths, censored=None))]
    fn observe(
        &self,
        py: Python<'_>,
        features: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        censored: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (features, lengths, censored) = (Features::new(features)?, numbers(lengths, "lengths")?, flags(censored)?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        py.detach(|| {
            let mut taken = 0;
            for (i, label) in labels(&rows, self.d, lengths, censored)?.into_iter().enumerate() {
                taken += usize::from(self.inner.shared().observe(rows.row(i)?, label)?);
            }
            Ok(taken)
        })
        .map_err(to_py)
    }

    fn flush(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.inner.flush()).map_err(to_py)
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.inner.save(&path)).map_err(to_py)
    }

    fn noise(&self, score: f64) -> f64 {
        self.inner.shared().snapshot().noise().sigma(score)
    }

    #[getter]
    fn known(&self) -> bool {
        self.inner.shared().snapshot().readout().is_some()
    }

    #[getter]
    fn updates(&self) -> u64 {
        self.inner.shared().snapshot().updates()
    }

    #[getter]
    fn dropped(&self) -> u64 {
        self.inner.shared().dropped()
    }

    #[getter]
    fn fault(&self) -> Option<String> {
        self.inner.shared().fault()
    }
}

#[pyfunction]
fn is_settled(max_tokens: u64, min_tokens: u64, ignore_eos: bool) -> bool {
    leap::online::is_settled(max_tokens, min_tokens, ignore_eos)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyOnlineReadout>()?;
    m.add_class::<PyLearner>()?;
    m.add_function(wrap_pyfunction!(is_settled, m)?)
}
