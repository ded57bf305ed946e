//! The private extension module `leap_rs._leap`. It converts arguments, releases the GIL and maps errors; every
//! decision is taken in the core crate or in Python.

#![allow(missing_docs, reason = "the public face is Python; its docs are in _leap.pyi")]

use pyo3::prelude::*;

mod admission;
mod error;
mod levers;
mod online;
mod order;
mod prompt;
mod readout;
mod replay;
mod stats;

#[pymodule]
fn _leap(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(m)?;
    readout::register(m)?;
    online::register(m)?;
    prompt::register(m)?;
    order::register(m)?;
    levers::register(m)?;
    admission::register(m)?;
    replay::register(m)?;
    stats::register(m)
}
