//! Feature rows in the number formats that models produce. A row is borrowed as it is, in f32, f64, f16 or bf16, and
//! converted where it is used, so a caller never has to copy a batch into another format first.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ndarray::ArrayView2;

use crate::kernels::{dot_bf16, dot_f16, dot_f32, dot_f64};
use crate::{Error, Result};

/// Most features that can be learned from: P of twice as many would take 64 GiB in f32.
const MOST_FEATURES: usize = 1 << 16;

/// Refuses a number of features whose matrices cannot be, before memory for them is asked for.
pub(crate) fn check_features(d: usize) -> Result<()> {
    if (1..=MOST_FEATURES).contains(&d) {
        return Ok(());
    }
    Err(Error::Config(format!("d is {d}, must be 1 to {MOST_FEATURES} features")))
}

/// One row of `d` features.
#[derive(Clone, Copy, Debug)]
pub enum Row<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE double precision.
    F64(&'a [f64]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl Row<'_> {
    /// Number of features.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether the row has no features.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Feature `i`, rounded to f32; `None` past the end.
    pub fn get(&self, i: usize) -> Option<f32> {
        match self {
            Self::F32(x) => x.get(i).copied(),
            Self::F64(x) => x.get(i).map(|&v| v as f32),
            Self::F16(x) => x.get(i).map(|v| v.to_f32()),
            Self::Bf16(x) => x.get(i).map(|v| v.to_f32()),
        }
    }

    /// Copies the row into `out`, exactly. `out` must be as long as the row; the shorter of both is copied.
    pub fn copy_to_f64(&self, out: &mut [f64]) {
        let n = self.len().min(out.len());
        let out = &mut out[..n];
        match self {
            Self::F32(x) => out.iter_mut().zip(*x).for_each(|(o, &v)| *o = f64::from(v)),
            Self::F64(x) => out.copy_from_slice(&x[..n]),
            Self::F16(x) => x[..n].convert_to_f64_slice(out),
            Self::Bf16(x) => out.iter_mut().zip(*x).for_each(|(o, v)| *o = v.to_f64()),
        }
    }

    /// The row in f64, exactly.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        let mut out = vec![0.0; self.len()];
        self.copy_to_f64(&mut out);
        out
    }

    /// The row in f32 (f64 is rounded).
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self {
            Self::F32(x) => x.to_vec(),
            Self::F64(x) => x.iter().map(|&v| v as f32).collect(),
            Self::F16(x) => x.to_f32_vec(),
            Self::Bf16(x) => x.to_f32_vec(),
        }
    }

    /// Sum of feature times `weight` over the shorter of both, in f32 (f64 for a row in f64), the partial sums in f64.
    pub(crate) fn dot(&self, weight: &[f32]) -> f64 {
        match self {
            Self::F32(x) => dot_f32(x, weight),
            Self::F64(x) => dot_f64(x, weight),
            Self::F16(x) => dot_f16(x.reinterpret_cast(), weight),
            Self::Bf16(x) => dot_bf16(x.reinterpret_cast(), weight),
        }
    }

    /// Position of the first NaN or infinite feature.
    pub fn first_non_finite(&self) -> Option<usize> {
        match self {
            Self::F32(x) => x.iter().position(|v| !v.is_finite()),
            Self::F64(x) => x.iter().position(|v| !v.is_finite()),
            Self::F16(x) => x.iter().position(|v| !v.is_finite()),
            Self::Bf16(x) => x.iter().position(|v| !v.is_finite()),
        }
    }

    /// Refuses a row that is not `d` wide or holds a NaN or an infinity.
    ///
    /// # Errors
    /// [`Error::Readout`] naming `row` and the column.
    pub fn check(&self, row: usize, d: usize) -> Result<()> {
        self.check_width(row, d)?;
        match self.first_non_finite() {
            Some(column) => Err(self.non_finite(row, column)),
            None => Ok(()),
        }
    }

    pub(crate) fn check_width(&self, row: usize, d: usize) -> Result<()> {
        if self.len() == d {
            return Ok(());
        }
        Err(Error::Readout(format!("row {row} has {} features, the readout takes {d}", self.len())))
    }

    pub(crate) fn non_finite(&self, row: usize, column: usize) -> Error {
        let what = match self.get(column) {
            Some(v) if v.is_nan() => "NaN",
            _ => "infinite",
        };
        Error::Readout(format!("row {row}, column {column}: the feature is {what}"))
    }
}

/// `n` rows of `d` features, each row contiguous in memory.
#[derive(Clone, Debug)]
pub enum Rows<'a> {
    /// IEEE single precision.
    F32(ArrayView2<'a, f32>),
    /// IEEE double precision.
    F64(ArrayView2<'a, f64>),
    /// IEEE half precision.
    F16(ArrayView2<'a, f16>),
    /// bfloat16.
    Bf16(ArrayView2<'a, bf16>),
}

/// Row `i` of a view as a slice that lives as long as the data.
fn slice<'a, T>(view: &ArrayView2<'a, T>, i: usize) -> Option<&'a [T]> {
    if i >= view.nrows() {
        return None;
    }
    let view: ArrayView2<'a, T> = *view;
    view.index_axis_move(ndarray::Axis(0), i).to_slice()
}

impl<'a> Rows<'a> {
    /// Number of rows.
    pub fn nrows(&self) -> usize {
        self.dim().0
    }

    /// Features per row.
    pub fn ncols(&self) -> usize {
        self.dim().1
    }

    fn dim(&self) -> (usize, usize) {
        match self {
            Self::F32(x) => x.dim(),
            Self::F64(x) => x.dim(),
            Self::F16(x) => x.dim(),
            Self::Bf16(x) => x.dim(),
        }
    }

    /// Row `i`.
    ///
    /// # Errors
    /// [`Error::Readout`] where `i` is past the end or the row is not contiguous in memory.
    pub fn row(&self, i: usize) -> Result<Row<'a>> {
        let row = match self {
            Self::F32(x) => slice(x, i).map(Row::F32),
            Self::F64(x) => slice(x, i).map(Row::F64),
            Self::F16(x) => slice(x, i).map(Row::F16),
            Self::Bf16(x) => slice(x, i).map(Row::Bf16),
        };
        row.ok_or_else(|| {
            let n = self.nrows();
            if i >= n {
                Error::Readout(format!("row {i} of {n} does not exist"))
            } else {
                Error::Readout(format!("row {i}: the features of a row must be contiguous in memory"))
            }
        })
    }

    pub(crate) fn check_width(&self, d: usize) -> Result<()> {
        if self.ncols() == d {
            return Ok(());
        }
        Err(Error::Readout(format!("rows have {} features, the readout takes {d}", self.ncols())))
    }
}
