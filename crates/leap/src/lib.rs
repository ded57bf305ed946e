//! Output-length prediction and length-aware scheduling for engines that serve language models.
//!
//! A [`readout::Readout`] reads an answer's length from features with one linear layer, [`rls`] corrects it with
//! every finished request, [`remaining`] turns a length and its noise into the order of one request, [`queue`] and
//! [`levers`] apply that order, and [`replay`] shows on a recorded trace what it would do. The crate knows nothing of
//! Python.

pub mod error;
mod kernels;
pub mod levers;
mod linalg;
pub mod noise;
pub mod online;
pub mod prompt;
pub mod queue;
pub mod readout;
pub mod remaining;
pub mod replay;
pub mod ridge;
pub mod rls;
pub mod rows;
pub mod stats;
mod tensors;

pub use error::{Error, Result};
