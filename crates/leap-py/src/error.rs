//! The one place that maps the core's errors to the exception family `LeapError`.

use pyo3::create_exception;
use pyo3::exceptions::{PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;

create_exception!(_leap, LeapError, PyValueError, "An input or option that leap-rs cannot use.");
create_exception!(_leap, TraceError, LeapError, "A trace cannot be used.");
create_exception!(_leap, ReadoutError, LeapError, "A readout, its anchor or its features cannot be used.");
create_exception!(_leap, ConfigError, LeapError, "An option cannot be used.");

pub fn to_py(error: leap::Error) -> PyErr {
    let text = error.to_string();
    match error {
        leap::Error::Trace(_) => TraceError::new_err(text),
        leap::Error::Readout(_) | leap::Error::Numeric(_) => ReadoutError::new_err(text),
        leap::Error::Config(_) => ConfigError::new_err(text),
        leap::Error::Io { .. } => LeapError::new_err(text),
        leap::Error::Cancelled => PyKeyboardInterrupt::new_err(text),
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = m.py();
    m.add("LeapError", py.get_type::<LeapError>())?;
    m.add("TraceError", py.get_type::<TraceError>())?;
    m.add("ReadoutError", py.get_type::<ReadoutError>())?;
    m.add("ConfigError", py.get_type::<ConfigError>())
}
