//! Anchored recursive least squares: every finished request corrects the readout in closed form, and the fitted
//! readout stays the anchor, because its training data weigh in through P0. Recursive least squares with exponential
//! forgetting: Haykin, Adaptive Filter Theory, ch. 10; its batch form is the Sherman-Morrison-Woodbury identity.

use std::path::Path;

use ndarray::{Array2, ArrayView2};

use crate::tensors::{self, Reader, Writer};
use crate::{Error, Result};

mod anchor;
mod core;

pub use anchor::Anchor;
use core::{Core, State};

/// Number format of P, which is what memory and time go into. Parameters, factors and sums are f64 in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Half the memory and traffic.
    #[default]
    F32,
    /// For results that must agree with one solve to many digits.
    F64,
}

impl std::str::FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "float32" => Ok(Self::F32),
            "float64" => Ok(Self::F64),
            _ => Err(Error::Config(format!("dtype {text:?}: expected float32 or float64"))),
        }
    }
}

/// What one row showed before it was learned from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Innovation {
    /// y - u'theta with the parameters after all earlier rows, those of the same batch included.
    pub residual: f64,
    /// u'Pu at the same moment: the residual's variance is sigma^2 (1 + u'Pu).
    pub leverage: f64,
}

/// The state: parameters theta (p) and P (p x p) of
/// `argmin sum f^(n-i) (y_i - u_i'theta)^2 + f^n (theta - theta0)' P0^-1 (theta - theta0)`.
///
/// Any split of the rows into batches gives the same result up to rounding. P is symmetric by construction and kept
/// positive definite. With forgetting f < 1, trace(P) never exceeds trace(P0): f is raised for as long as it would.
#[derive(Clone, Debug)]
pub struct Rls {
    state: State,
}

macro_rules! each {
    ($self:expr, $core:ident => $body:expr) => {
        match $self {
            State::F32($core) => $body,
            State::F64($core) => $body,
        }
    };
}

impl Rls {
    /// Starts at `theta0` (p) with a diagonal P0 (p).
    ///
    /// # Errors
    /// [`Error::Config`] where lengths differ, P0 is not finite and above 0, or forgetting is not in (0, 1].
    pub fn with_diagonal(theta0: &[f64], p0: &[f64], forgetting: f64, precision: Precision) -> Result<Self> {
        if p0.len() != theta0.len() || !p0.iter().all(|v| v.is_finite() && *v > 0.0) {
            return Err(Error::Config(format!("P0 must be {} finite values above 0", theta0.len())));
        }
        let state = match precision {
            Precision::F32 => State::F32(Core::new(theta0, crate::linalg::SymTiles::diagonal(p0), forgetting)?),
            Precision::F64 => State::F64(Core::new(theta0, crate::linalg::SymTiles::diagonal(p0), forgetting)?),
        };
        Ok(Self { state })
    }

    /// Starts at `theta0` (p, the bias last) with P0 = (Us'Us + lambda D)^-1 of the anchor.
    ///
    /// # Errors
    /// [`Error::Readout`] where the anchor is for another width, [`Error::Numeric`] where it cannot be inverted,
    /// [`Error::Config`] where forgetting is not in (0, 1].
    pub fn with_anchor(theta0: &[f64], anchor: &Anchor, forgetting: f64, precision: Precision) -> Result<Self> {
        if anchor.d() + 1 != theta0.len() {
            let (d, p) = (anchor.d(), theta0.len());
            return Err(Error::Readout(format!("the anchor is for {d} features, theta has {p} values")));
        }
        let p0 = anchor.p0()?;
        let state = match precision {
            Precision::F32 => {
                let values = p0.values().map(|v| v as f32);
                State::F32(Core::new(theta0, crate::linalg::SymTiles::from_values(p0.n(), values), forgetting)?)
            }
            Precision::F64 => State::F64(Core::new(theta0, p0, forgetting)?),
        };
        Ok(Self { state })
    }

    /// Learns from `u` (k, p) and `y` (k) in order; k may be anything. Returns what each row showed beforehand.
    ///
    /// # Errors
    /// [`Error::Readout`] naming the first row that is NaN, infinite or too large to square, [`Error::Numeric`] where
    /// the arithmetic fails; either changes nothing.
    pub fn update(&mut self, u: &ArrayView2<f64>, y: &[f64]) -> Result<Vec<Innovation>> {
        each!(&mut self.state, core => core.update(u, y))
    }

    /// Parameters (p).
    pub fn theta(&self) -> &[f64] {
        each!(&self.state, core => core.theta())
    }

    /// P (p, p), dense: for inspection.
    pub fn p(&self) -> Array2<f64> {
        each!(&self.state, core => core.p())
    }

    /// Trace of P.
    pub fn trace(&self) -> f64 {
        each!(&self.state, core => core.trace())
    }

    /// Trace of P0.
    pub fn trace0(&self) -> f64 {
        each!(&self.state, core => core.trace0())
    }

    /// Rows learned from.
    pub fn rows(&self) -> u64 {
        each!(&self.state, core => core.rows())
    }

    /// How often rounding had eaten so far into P that its diagonal was raised to keep it positive definite.
    pub fn repairs(&self) -> u64 {
        each!(&self.state, core => core.repairs())
    }

    /// Number format of P.
    pub fn precision(&self) -> Precision {
        match self.state {
            State::F32(_) => Precision::F32,
            State::F64(_) => Precision::F64,
        }
    }

    /// Writes the whole state; [`Self::load`] continues from it bit by bit as this one would.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut file = Writer::default();
        self.write_to(&mut file);
        file.write(path)
    }

    /// Reads a state.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] naming the file and what does not match.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = tensors::read(path)?;
        Self::read_from(&Reader::parse(path, &bytes)?)
    }

    pub(crate) fn write_to(&self, file: &mut Writer) {
        each!(&self.state, core => core.write_to(file));
    }

    pub(crate) fn read_from(file: &Reader) -> Result<Self> {
        let state = match file.value("rls_precision")? {
            Precision::F32 => State::F32(Core::read_from(file)?),
            Precision::F64 => State::F64(Core::read_from(file)?),
        };
        Ok(Self { state })
    }
}
