use std::path::PathBuf;

use leap::prompt::{self, PromptFeatures};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::error::{ReadoutError, to_py};
use crate::readout::Features;

/// Tokens up to which a prompt is pooled without giving up the GIL.
const ATTACHED: usize = 4096;

#[pyclass(name = "PromptFeatures", module = "leap_rs", frozen)]
pub struct PyPromptFeatures {
    inner: PromptFeatures,
}

/// Token ids as they come: uint32 without a copy, any other whole numbers checked one by one.
fn with_ids<R>(ids: &Bound<'_, PyAny>, f: impl FnOnce(&[u32]) -> R) -> PyResult<R> {
    if let Ok(array) = ids.extract::<PyReadonlyArray1<'_, u32>>()
        && let Ok(slice) = array.as_slice()
    {
        return Ok(f(slice));
    }
    let wide: Vec<i64> =
        ids.extract().map_err(|_| ReadoutError::new_err("token ids must be whole numbers in one dimension"))?;
    let convert = |(i, &id): (usize, &i64)| {
        u32::try_from(id).map_err(|_| ReadoutError::new_err(format!("token {i}: {id} is no token id")))
    };
    Ok(f(&wide.iter().enumerate().map(convert).collect::<PyResult<Vec<u32>>>()?))
}

#[pymethods]
impl PyPromptFeatures {
    #[new]
    #[pyo3(signature = (embedding, *, dim=256, seed=0))]
    fn new(py: Python<'_>, embedding: &Bound<'_, PyAny>, dim: usize, seed: u64) -> PyResult<Self> {
        let embedding = Features::new(embedding)?;
        let rows = embedding.rows()?;
        Ok(Self { inner: py.detach(|| PromptFeatures::new(&rows, dim, seed)).map_err(to_py)? })
    }

    #[classmethod]
    #[pyo3(signature = (path, tensor, *, dim=256, seed=0))]
    fn from_safetensors(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        path: PathBuf,
        tensor: &str,
        dim: usize,
        seed: u64,
    ) -> PyResult<Self> {
        let inner = py.detach(|| PromptFeatures::from_safetensors(&path, tensor, dim, seed)).map_err(to_py)?;
        Ok(Self { inner })
    }

    fn pool<'py>(&self, py: Python<'py>, token_ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        // A short prompt takes microseconds; to get the GIL back from another thread may take milliseconds.
        let pool = |ids: &[u32]| {
            if ids.len() <= ATTACHED { self.inner.pool(ids) } else { py.detach(|| self.inner.pool(ids)) }
        };
        let features = with_ids(token_ids, pool)?.map_err(to_py)?;
        Ok(features.into_pyarray(py))
    }

    /// The same features from the mean embedding (d,) of a prompt of `tokens` tokens.
    fn project<'py>(
        &self,
        py: Python<'py>,
        mean: &Bound<'py, PyAny>,
        tokens: u32,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let mean = Features::new(mean)?;
        let rows = mean.rows()?;
        if rows.nrows() != 1 {
            return Err(ReadoutError::new_err(format!("{} means, expected one", rows.nrows())));
        }
        let features = py.detach(|| self.inner.project(rows.row(0)?, tokens)).map_err(to_py)?;
        Ok(features.into_pyarray(py))
    }

    /// sqrt(n), ln(1 + n) and n.
    #[staticmethod]
    fn length_features(py: Python<'_>, tokens: u32) -> Bound<'_, PyArray1<f32>> {
        PyArray1::from_slice(py, &prompt::length_features(tokens))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.inner.save(&path)).map_err(to_py)
    }

    #[classmethod]
    fn load(_class: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self { inner: py.detach(|| PromptFeatures::load(&path)).map_err(to_py)? })
    }

    #[getter]
    fn dim(&self) -> usize {
        self.inner.dim()
    }

    #[getter]
    fn width(&self) -> usize {
        self.inner.width()
    }

    #[getter]
    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    #[getter]
    fn d(&self) -> usize {
        self.inner.d()
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyPromptFeatures>()
}
