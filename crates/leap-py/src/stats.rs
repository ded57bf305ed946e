use leap::stats;
use numpy::{AllowTypeChange, PyArrayLike1};
use pyo3::prelude::*;

use crate::error::to_py;

type Numbers<'py> = PyArrayLike1<'py, f64, AllowTypeChange>;

/// What `measure` finds in two arrays of the same length.
fn between(
    py: Python<'_>,
    a: &Numbers<'_>,
    b: &Numbers<'_>,
    measure: impl FnOnce(&[f64], &[f64]) -> Option<f64> + Send,
) -> PyResult<Option<f64>> {
    let (a, b) = (a.as_array().to_vec(), b.as_array().to_vec());
    if a.len() != b.len() {
        return Err(to_py(leap::Error::Config(format!("{} values beside {}", a.len(), b.len()))));
    }
    Ok(py.detach(|| measure(&a, &b)))
}

#[pyfunction]
fn spearman(py: Python<'_>, a: Numbers<'_>, b: Numbers<'_>) -> PyResult<Option<f64>> {
    between(py, &a, &b, stats::spearman)
}

#[pyfunction]
fn kendall_tau_b(py: Python<'_>, a: Numbers<'_>, b: Numbers<'_>) -> PyResult<Option<f64>> {
    between(py, &a, &b, stats::kendall_tau_b)
}

#[pyfunction]
fn pairwise_accuracy(
    py: Python<'_>,
    predicted: Numbers<'_>,
    lengths: Numbers<'_>,
    ratio: f64,
) -> PyResult<Option<f64>> {
    between(py, &predicted, &lengths, |predicted, lengths| stats::pairwise_accuracy(predicted, lengths, ratio))
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(spearman, m)?)?;
    m.add_function(wrap_pyfunction!(kendall_tau_b, m)?)?;
    m.add_function(wrap_pyfunction!(pairwise_accuracy, m)?)
}
