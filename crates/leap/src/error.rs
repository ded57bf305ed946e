//! The one error type of the crate. Each variant is a kind of fault that a caller can act on; the text names what is
//! wrong and where.

use std::path::{Path, PathBuf};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A trace, or a row of it, cannot be used.
    #[error("{0}")]
    Trace(String),
    /// A readout, its anchor, or features given to it cannot be used.
    #[error("{0}")]
    Readout(String),
    /// An option, or a combination of options, cannot be used.
    #[error("{0}")]
    Config(String),
    /// A factorisation failed, or its residual shows that the linear algebra library computed wrong numbers.
    #[error("{0}")]
    Numeric(String),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// An [`Error::Io`] for `path`.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_path_buf(), source }
    }
}

/// Result with the crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
