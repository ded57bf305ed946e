//! Symmetric matrices as tiles of the lower triangle, and positive definite solves whose result is checked. Tiles
//! halve memory and traffic, which is what bounds the updates, and make a matrix symmetric by construction.

use std::ops::Range;
use std::sync::Once;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, LinalgScalar, s};
use ndarray_linalg::{Cholesky, FactorizeCInto, InverseCInto, Lapack, SolveC, UPLO};

use crate::kernels::{self, Panels, Scalar, Tile};
use crate::{Error, Result};

/// Side of a tile: 64k values fit in a core's own cache, and what a product reads and writes beside them in its first
/// level.
const TILE: usize = 256;

/// f32 or f64.
pub(crate) trait Real: Lapack<Real = Self> + LinalgScalar + Scalar + PartialOrd + Send + Sync {
    /// Distance from 1 to the next number.
    const EPSILON: f64;

    fn narrow(v: f64) -> Self;

    fn wide(self) -> f64;
}

impl Real for f32 {
    const EPSILON: f64 = f32::EPSILON as f64;

    fn narrow(v: f64) -> Self {
        v as Self
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    const EPSILON: f64 = f64::EPSILON;

    fn narrow(v: f64) -> Self {
        v
    }

    fn wide(self) -> f64 {
        self
    }
}

/// Keeps the linear algebra library to one thread (or `LEAP_BLAS_THREADS`), once a process: the cores belong to the
/// engine that we run beside.
pub(crate) fn limit_threads() {
    unsafe extern "C" {
        fn openblas_set_num_threads(n: std::ffi::c_int);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let wanted = std::env::var("LEAP_BLAS_THREADS").ok().and_then(|v| v.parse().ok());
        let threads: u16 = wanted.unwrap_or(1).max(1);
        // SAFETY: OpenBLAS, which ndarray-linalg links, exports this function with this signature; it only stores the
        // number, and `call_once` keeps two threads from storing at the same time.
        unsafe { openblas_set_num_threads(threads.into()) };
    });
}

/// A symmetric n x n matrix: square tiles of the lower triangle, row by row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SymTiles<T> {
    n: usize,
    tiles: Vec<Array2<T>>,
}

fn blocks(n: usize) -> usize {
    n.div_ceil(TILE).max(1)
}

fn span(n: usize, i: usize) -> Range<usize> {
    i * TILE..((i + 1) * TILE).min(n)
}

/// Copies the lower half of a square tile up.
fn mirror<T: Copy>(tile: &mut Array2<T>) {
    let side = tile.nrows();
    if let Some(values) = tile.as_slice_mut() {
        for r in 1..side {
            let (above, row) = values.split_at_mut(r * side);
            above.iter_mut().skip(r).step_by(side).zip(&row[..r]).for_each(|(a, &b)| *a = b);
        }
    }
}

impl<T: Real> SymTiles<T> {
    pub fn zeros(n: usize) -> Self {
        limit_threads();
        let tiles = (0..blocks(n)).flat_map(|i| (0..=i).map(move |j| (span(n, i).len(), span(n, j).len())));
        Self { n, tiles: tiles.map(Array2::zeros).collect() }
    }

    pub fn diagonal(values: &[f64]) -> Self {
        let mut out = Self::zeros(values.len());
        out.map_diagonal(|i, _| T::narrow(values[i]));
        out
    }

    /// From the values at (row, column) of the lower triangle.
    pub fn from_fn(n: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        let mut out = Self::zeros(n);
        out.each_tile(|i, j, tile| {
            tile.indexed_iter_mut().for_each(|((r, c), t)| *t = T::narrow(f(i.start + r, j.start + c)));
        });
        out
    }

    /// From the lower triangle of a dense matrix.
    pub fn from_dense(dense: &ArrayView2<f64>) -> Self {
        Self::from_fn(dense.nrows(), |i, j| dense[(i, j)])
    }

    pub fn to_dense(&self) -> Array2<T> {
        let mut out = Array2::zeros((self.n, self.n));
        let mut tiles = self.tiles.iter();
        for i in 0..blocks(self.n) {
            for (j, tile) in (0..=i).zip(&mut tiles) {
                let (i, j) = (span(self.n, i), span(self.n, j));
                out.slice_mut(s![i.clone(), j.clone()]).assign(tile);
                out.slice_mut(s![j, i]).assign(&tile.t());
            }
        }
        out
    }

    pub fn n(&self) -> usize {
        self.n
    }

    /// Calls `f(rows, columns, tile)` for every tile, then copies the lower half of the tiles on the diagonal up.
    fn each_tile(&mut self, mut f: impl FnMut(Range<usize>, Range<usize>, &mut Array2<T>)) {
        let n = self.n;
        let mut tiles = self.tiles.iter_mut();
        for i in 0..blocks(n) {
            for (j, tile) in (0..=i).zip(&mut tiles) {
                f(span(n, i), span(n, j), tile);
                if i == j {
                    mirror(tile);
                }
            }
        }
    }

    /// self = beta self + alpha X'X for X (k x n).
    pub fn add_gram(&mut self, alpha: T, x: &ArrayView2<T>, beta: T) {
        self.each_tile(|i, j, tile| {
            general_mat_mul(alpha, &x.slice(s![.., i]).t(), &x.slice(s![.., j]), beta, tile);
        });
    }

    /// The same for rows X (any number, n) one after the other, without the linear algebra library, whose products are
    /// a sixth as fast where it does not know the processor.
    pub fn fold(&mut self, alpha: T, rows: &[T], beta: T) {
        let panels = Panels::new(rows, self.n);
        self.each_tile(|i, j, tile| {
            if let Some(values) = tile.as_slice_mut() {
                panels.add_gram(alpha, beta, i.start, j.start, j.len(), values);
            }
        });
    }

    /// self += alpha other.
    pub fn add(&mut self, alpha: T, other: &Self) {
        for (a, b) in self.tiles.iter_mut().zip(&other.tiles) {
            a.zip_mut_with(b, |a, &b| *a += alpha * b);
        }
    }

    /// U A for U (k x n, row by row): reads every tile once.
    pub fn times_rows(&self, u: &[T]) -> Vec<T> {
        let mut out = vec![T::narrow(0.0); u.len()];
        let mut tiles = self.tiles.iter();
        for bi in 0..blocks(self.n) {
            for (bj, tile) in (0..=bi).zip(&mut tiles) {
                let (row, column) = (span(self.n, bi).start, span(self.n, bj).start);
                if let Some(values) = tile.as_slice() {
                    let tile = Tile { values, row, column, columns: tile.ncols() };
                    kernels::multiply(&tile, self.n, u, &mut out);
                }
            }
        }
        out
    }

    pub fn map_diagonal(&mut self, mut f: impl FnMut(usize, T) -> T) {
        let n = self.n;
        for b in 0..blocks(n) {
            let tile = &mut self.tiles[b * (b + 1) / 2 + b];
            for (r, i) in span(n, b).enumerate() {
                tile[(r, r)] = f(i, tile[(r, r)]);
            }
        }
    }

    pub fn diag(&self) -> Vec<f64> {
        let n = self.n;
        (0..blocks(n))
            .flat_map(|b| self.tiles[b * (b + 1) / 2 + b].diag().iter().map(|v| v.wide()).collect::<Vec<_>>())
            .collect()
    }

    pub fn trace(&self) -> f64 {
        self.diag().iter().sum()
    }

    /// The values of all tiles, in order.
    pub fn values(&self) -> impl Iterator<Item = T> + '_ {
        self.tiles.iter().flat_map(|t| t.iter().copied())
    }

    /// How many values [`Self::values`] gives for an n x n matrix.
    pub fn stored(n: usize) -> usize {
        (0..blocks(n)).map(|i| span(n, i).len() * span(n, i).end).sum()
    }

    /// From the values that [`Self::values`] gave.
    pub fn from_values(n: usize, values: impl IntoIterator<Item = T>) -> Self {
        let mut values = values.into_iter();
        let mut out = Self::zeros(n);
        for tile in &mut out.tiles {
            tile.iter_mut().zip(&mut values).for_each(|(t, v)| *t = v);
        }
        out
    }

    /// A x without the linear algebra library: a second opinion on what it computed.
    pub fn plain_times(&self, x: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; self.n];
        let mut tiles = self.tiles.iter();
        for bi in 0..blocks(self.n) {
            for (bj, tile) in (0..=bi).zip(&mut tiles) {
                let (i, j) = (span(self.n, bi), span(self.n, bj));
                for (row, r) in tile.rows().into_iter().zip(i) {
                    let mut sum = 0.0;
                    for (&a, c) in row.iter().zip(j.clone()) {
                        sum += a.wide() * x[c];
                        if bi != bj {
                            out[c] += a.wide() * x[r];
                        }
                    }
                    out[r] += sum;
                }
            }
        }
        out
    }

    fn frobenius(&self) -> f64 {
        // Off-diagonal tiles count twice; a factor below 2 does not matter for a tolerance.
        self.values().map(|v| v.wide() * v.wide()).sum::<f64>().sqrt()
    }

    /// Whether A - `shift` I is positive definite.
    pub fn is_positive_definite(&self, shift: f64) -> bool {
        let mut dense = self.to_dense();
        dense.diag_mut().mapv_inplace(|v| v - T::narrow(shift));
        dense.cholesky(UPLO::Lower).is_ok_and(|l| l.diag().iter().all(|v| v.wide() > 0.0))
    }
}

/// A fixed vector of ±1 that no structure of the data is likely to be orthogonal to.
pub(crate) fn probe(n: usize) -> Vec<f64> {
    let sign = |i: usize| (i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 & 1;
    (0..n).map(|i| if sign(i) == 1 { 1.0 } else { -1.0 }).collect()
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Part of the message of an error that a larger penalty cures.
pub(crate) const NOT_DEFINITE: &str = "is not positive definite";

fn not_definite(what: &str) -> Error {
    Error::Numeric(format!("{what}: the matrix {NOT_DEFINITE}; a larger lam makes it so"))
}

/// Refuses `got` where it differs from `expected` by more than `tolerance * scale`.
pub(crate) fn check(what: &str, got: &[f64], expected: &[f64], scale: f64, tolerance: f64) -> Result<()> {
    let difference: Vec<f64> = got.iter().zip(expected).map(|(a, b)| a - b).collect();
    let relative = norm(&difference) / scale.max(f64::MIN_POSITIVE);
    if relative <= tolerance {
        return Ok(());
    }
    Err(Error::Numeric(format!(
        "{what}: relative residual {relative:.1e}; the linear algebra library may be computing wrong numbers on this \
         processor"
    )))
}

/// x with A x = b for a positive definite A, checked by its residual.
pub(crate) fn solve(what: &str, a: &SymTiles<f64>, b: &[f64]) -> Result<Vec<f64>> {
    let factor = a.to_dense().factorizec_into(UPLO::Lower).map_err(|_| not_definite(what))?;
    let x = factor.solvec(&ndarray::aview1(b)).map_err(|_| not_definite(what))?.to_vec();
    check(what, &a.plain_times(&x), b, a.frobenius() * norm(&x) + norm(b), 1e-9)?;
    Ok(x)
}

/// The inverse of a positive definite matrix, checked with a probe vector.
pub(crate) fn inverse(what: &str, a: &SymTiles<f64>) -> Result<SymTiles<f64>> {
    let dense = a.to_dense().invc_into().map_err(|_| not_definite(what))?;
    let out = SymTiles::from_dense(&dense.view());
    let v = probe(a.n());
    let x = out.plain_times(&v);
    check(what, &a.plain_times(&x), &v, a.frobenius() * norm(&x) + norm(&v), 1e-9)?;
    Ok(out)
}
