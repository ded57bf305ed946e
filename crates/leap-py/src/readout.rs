use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use half::slice::HalfBitsSliceExt;
use leap::readout::{Kind, Meta, Readout, Target};
use leap::ridge::{self, FitOptions, Moments};
use leap::rls::Anchor;
use leap::rows::Rows;
use ndarray::ArrayView2;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::error::{ConfigError, ReadoutError, to_py};

/// A feature matrix (n, d) borrowed from numpy in its own number format.
pub enum Features<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    F64(PyReadonlyArray2<'py, f64>),
    F16(PyReadonlyArray2<'py, half::f16>),
    Bf16(PyReadonlyArray2<'py, u16>),
}

impl<'py> Features<'py> {
    /// Takes (n, d), or (d,) for one row. A copy is made only where rows are not contiguous.
    pub fn new(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut array = object.py().import("numpy")?.call_method1("ascontiguousarray", (object,))?;
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        match shape[..] {
            [_, _] => {}
            [d] => array = array.call_method1("reshape", (1, d))?,
            _ => return Err(ReadoutError::new_err(format!("features have shape {shape:?}, expected (n, d)"))),
        }
        let name: String = array.getattr("dtype")?.getattr("name")?.extract()?;
        let wrong = |_| ReadoutError::new_err(format!("features are {name} in foreign byte order"));
        match name.as_str() {
            "float32" => Ok(Self::F32(array.extract().map_err(wrong)?)),
            "float64" => Ok(Self::F64(array.extract().map_err(wrong)?)),
            "float16" => Ok(Self::F16(array.extract().map_err(wrong)?)),
            "uint16" => Ok(Self::Bf16(array.extract().map_err(wrong)?)),
            "bfloat16" => Ok(Self::Bf16(array.call_method1("view", ("uint16",))?.extract().map_err(wrong)?)),
            _ => Err(ReadoutError::new_err(format!(
                "features are {name}, expected float16, float32, float64, bfloat16 or its bits as uint16"
            ))),
        }
    }

    pub fn rows(&self) -> PyResult<Rows<'_>> {
        Ok(match self {
            Self::F32(x) => Rows::F32(x.as_array()),
            Self::F64(x) => Rows::F64(x.as_array()),
            Self::F16(x) => Rows::F16(x.as_array()),
            Self::Bf16(x) => {
                let shape = x.as_array().dim();
                let bits: &[bf16] = x.as_slice()?.reinterpret_cast();
                Rows::Bf16(ArrayView2::from_shape(shape, bits).map_err(|e| ReadoutError::new_err(e.to_string()))?)
            }
        })
    }
}

/// Any numbers (n,) as f64.
pub fn numbers<'py>(object: &Bound<'py, PyAny>, what: &str) -> PyResult<PyReadonlyArray1<'py, f64>> {
    let kwargs = PyDict::new(object.py());
    kwargs.set_item("dtype", "float64")?;
    let array = object.py().import("numpy")?.call_method("ascontiguousarray", (object,), Some(&kwargs))?;
    array.extract().map_err(|_| ReadoutError::new_err(format!("{what} must be one-dimensional")))
}

/// Lower and upper ends (n,) of the ranges that lengths take up in their predicted distributions.
pub type Pit<'py> = (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>);

pub fn pit(py: Python<'_>, ranges: Vec<(f64, f64)>) -> Pit<'_> {
    let (low, high): (Vec<f64>, Vec<f64>) = ranges.into_iter().unzip();
    (low.into_pyarray(py), high.into_pyarray(py))
}

pub fn same_number(rows: &Rows, lengths: &[f64]) -> leap::Result<()> {
    if rows.nrows() == lengths.len() {
        return Ok(());
    }
    Err(leap::Error::Readout(format!("{} rows of features, {} lengths", rows.nrows(), lengths.len())))
}

fn meta_from(dict: Option<&Bound<'_, PyDict>>) -> PyResult<Meta> {
    let mut meta = Meta::new(Kind::State);
    for (key, value) in dict.into_iter().flatten() {
        let key: String = key.extract()?;
        if value.is_none() {
            continue;
        }
        match key.as_str() {
            "kind" => meta.kind = value.extract::<String>()?.parse().map_err(to_py)?,
            "model" => meta.model = Some(value.extract()?),
            "layer" => meta.layer = Some(value.extract()?),
            "fit_date" => meta.fit_date = Some(value.extract()?),
            "trained_on" => meta.trained_on = value.extract()?,
            "train_spearman" => return Err(ConfigError::new_err("train_spearman is measured, not given")),
            _ => {
                meta.extra.insert(key, value.str()?.to_string());
            }
        }
    }
    Ok(meta)
}

fn meta_to<'py>(py: Python<'py>, meta: &Meta) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let extra: &BTreeMap<String, String> = &meta.extra;
    for (key, value) in extra {
        dict.set_item(key, value)?;
    }
    dict.set_item("kind", meta.kind.to_string())?;
    dict.set_item("model", &meta.model)?;
    dict.set_item("layer", meta.layer)?;
    dict.set_item("fit_date", &meta.fit_date)?;
    dict.set_item("train_spearman", meta.train_spearman)?;
    dict.set_item("trained_on", &meta.trained_on)?;
    Ok(dict)
}

/// A readout and, where it was just fitted or lies beside its file, its anchor.
#[pyclass(name = "Readout", module = "leap_rs", frozen)]
pub struct PyReadout {
    pub inner: Readout,
    anchor: Option<Arc<Anchor>>,
    path: Option<PathBuf>,
}

impl PyReadout {
    pub fn bare(inner: Readout) -> Self {
        Self { inner, anchor: None, path: None }
    }

    fn fitted((inner, anchor): (Readout, Anchor)) -> Self {
        Self { inner, anchor: Some(Arc::new(anchor)), path: None }
    }

    /// The anchor from the fit, or the one beside the file that this was loaded from.
    pub fn anchor(&self) -> leap::Result<Option<Anchor>> {
        if let Some(anchor) = &self.anchor {
            return Ok(Some(Anchor::clone(anchor)));
        }
        let beside = self.path.as_deref().map(Anchor::path_for).filter(|p| p.exists());
        beside.map(|p| Anchor::load(&p)).transpose()
    }
}

#[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
fn options(
    max_tokens: u32,
    target: &str,
    lam: Option<f64>,
    folds: usize,
    seed: u64,
    meta: Option<&Bound<'_, PyDict>>,
) -> PyResult<FitOptions> {
    let target: Target = target.parse().map_err(to_py)?;
    Ok(FitOptions { max_tokens, target, lam, folds, seed, meta: meta_from(meta)? })
}

#[pymethods]
impl PyReadout {
    #[classmethod]
    #[pyo3(signature = (features, lengths, *, max_tokens, target="sqrt", lam=None, folds=5, seed=0, meta=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    fn fit(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        features: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        max_tokens: u32,
        target: &str,
        lam: Option<f64>,
        folds: usize,
        seed: u64,
        meta: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = options(max_tokens, target, lam, folds, seed, meta)?;
        let (features, lengths) = (Features::new(features)?, numbers(lengths, "lengths")?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        py.detach(|| ridge::fit(&rows, lengths, &options)).map(Self::fitted).map_err(to_py)
    }

    fn score<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let features = Features::new(features)?;
        let rows = features.rows()?;
        let scores = py.detach(|| self.inner.score(&rows)).map_err(to_py)?;
        Ok(scores.into_pyarray(py))
    }

    fn predict<'py>(&self, py: Python<'py>, features: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let features = Features::new(features)?;
        let rows = features.rows()?;
        let lengths = py.detach(|| self.inner.predict(&rows)).map_err(to_py)?;
        Ok(lengths.into_pyarray(py))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| {
            self.inner.save(&path)?;
            self.anchor.as_ref().map_or(Ok(()), |anchor| anchor.save(&Anchor::path_for(&path)))
        })
        .map_err(to_py)
    }

    #[classmethod]
    fn load(_class: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| Readout::load(&path)).map_err(to_py)?;
        Ok(Self { inner, anchor: None, path: Some(path) })
    }

    #[getter]
    fn d(&self) -> usize {
        self.inner.d()
    }

    #[getter]
    fn max_tokens(&self) -> u32 {
        self.inner.max_tokens()
    }

    #[getter]
    fn target(&self) -> String {
        self.inner.target().to_string()
    }

    #[getter]
    fn lam(&self) -> f64 {
        self.inner.lam()
    }

    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        meta_to(py, self.inner.meta())
    }

    #[getter]
    fn mean<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.parts().mean)
    }

    #[getter]
    fn scale<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.parts().scale)
    }

    #[getter]
    fn weight<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.parts().weight)
    }

    #[getter]
    fn bias(&self) -> f32 {
        self.inner.parts().bias
    }

    /// Standard deviation of sqrt(length) about a score on that scale; None where it was not measured.
    fn noise(&self, score: f64) -> Option<f64> {
        self.inner.noise().map(|noise| noise.sigma(score))
    }

    fn pit<'py>(
        &self,
        py: Python<'py>,
        features: &Bound<'py, PyAny>,
        lengths: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Pit<'py>>> {
        let (features, lengths) = (Features::new(features)?, numbers(lengths, "lengths")?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        let ranges = py.detach(|| -> leap::Result<Option<Vec<_>>> {
            same_number(&rows, lengths)?;
            lengths.iter().enumerate().map(|(i, &l)| self.inner.pit_row(rows.row(i)?, l)).collect()
        });
        Ok(ranges.map_err(to_py)?.map(|ranges| pit(py, ranges)))
    }

    fn __repr__(&self) -> String {
        let (d, m, t) = (self.inner.d(), self.inner.max_tokens(), self.inner.target());
        format!("Readout(d={d}, max_tokens={m}, target={:?}, lam={})", t.to_string(), self.inner.lam())
    }
}

/// A fit whose rows come in parts.
#[pyclass(name = "Moments", module = "leap_rs", frozen)]
pub struct PyMoments {
    inner: Mutex<Option<Moments>>,
}

#[pymethods]
impl PyMoments {
    #[new]
    #[pyo3(signature = (d, *, max_tokens, target="sqrt", lam=None, folds=5, seed=0, meta=None))]
    fn new(
        d: usize,
        max_tokens: u32,
        target: &str,
        lam: Option<f64>,
        folds: usize,
        seed: u64,
        meta: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = options(max_tokens, target, lam, folds, seed, meta)?;
        Ok(Self { inner: Mutex::new(Some(Moments::new(d, options).map_err(to_py)?)) })
    }

    fn add(&self, py: Python<'_>, features: &Bound<'_, PyAny>, lengths: &Bound<'_, PyAny>) -> PyResult<()> {
        let (features, lengths) = (Features::new(features)?, numbers(lengths, "lengths")?);
        let (rows, lengths) = (features.rows()?, lengths.as_slice()?);
        py.detach(|| match &mut *self.inner.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(moments) => moments.add(&rows, lengths),
            None => Err(finished()),
        })
        .map_err(to_py)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyReadout> {
        py.detach(|| {
            let moments = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            moments.ok_or_else(finished)?.finish()
        })
        .map(PyReadout::fitted)
        .map_err(to_py)
    }
}

fn finished() -> leap::Error {
    leap::Error::Config("the moments are finished".into())
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyReadout>()?;
    m.add_class::<PyMoments>()
}
