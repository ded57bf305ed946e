//! The update itself, in one number format.
//!
//! P is kept as `c (B - W'W)`: a base B in tiles, the rows W of the updates since B was last written, and a scalar c
//! for forgetting. An update then reads B once and writes only k rows; W is folded into B when it is full. That is a
//! third of the memory traffic of rewriting P each time, and B is rounded once per fold instead of once per update,
//! which is what keeps f32 close to the exact solution.

use ndarray::{Array2, ArrayView2, s};

use super::Innovation;
use crate::kernels::deflate;
use crate::linalg::{Real, SymTiles};
use crate::tensors::{Reader, Writer};
use crate::{Error, Result};

const VERSION_KEY: &str = "leap_rls_version";
const VERSION: &str = "1";
/// B is tested for positive definiteness once in this many folds; with the folds' size that is once in p rows or more,
/// a small part of the updates' own work.
const FOLDS_PER_TEST: u64 = 16;
/// Rows of a batch that are one update. More would discount by more at a time, which the limit on the trace of P then
/// forbids for all of them; and W must have room for them.
const MOST_TOGETHER: usize = 64;
/// Larger values cannot be squared and summed in f32.
const LIMIT: f64 = 1e15;

#[derive(Clone, Debug)]
pub(super) enum State {
    F32(Core<f32>),
    F64(Core<f64>),
}

/// How a number format is stored.
pub(super) trait Stored: Real {
    const NAME: &'static str;

    fn write(file: &mut Writer, name: &str, shape: &[usize], data: &[Self]);

    fn read(file: &Reader, name: &str, shape: &[usize]) -> Result<Vec<Self>>;
}

impl Stored for f32 {
    const NAME: &'static str = "float32";

    fn write(file: &mut Writer, name: &str, shape: &[usize], data: &[Self]) {
        file.f32(name, shape, data);
    }

    fn read(file: &Reader, name: &str, shape: &[usize]) -> Result<Vec<Self>> {
        file.f32(name, shape)
    }
}

impl Stored for f64 {
    const NAME: &'static str = "float64";

    fn write(file: &mut Writer, name: &str, shape: &[usize], data: &[Self]) {
        file.f64(name, shape, data);
    }

    fn read(file: &Reader, name: &str, shape: &[usize]) -> Result<Vec<Self>> {
        file.f64(name, shape)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Core<T> {
    theta: Vec<f64>,
    base: SymTiles<T>,
    base_trace: f64,
    factor: f64,
    /// The first `used` rows are in force.
    pending: Array2<T>,
    used: usize,
    pending_squares: f64,
    trace0: f64,
    forgetting: f64,
    rows: u64,
    folds: u64,
    repairs: u64,
    /// A row was met along which P is not positive.
    suspect: bool,
}

/// Rows of W: large enough that folding is cheap, small enough that W is a small part of what an update reads.
fn capacity(p: usize) -> usize {
    (p / 16).clamp(32, 256)
}

impl<T: Stored> Core<T> {
    pub fn new(theta: &[f64], p0: SymTiles<T>, forgetting: f64) -> Result<Self> {
        if !(forgetting > 0.0 && forgetting <= 1.0) {
            return Err(Error::Config(format!("forgetting is {forgetting}, must be above 0 and at most 1")));
        }
        if let Some(i) = theta.iter().position(|v| !v.is_finite()) {
            return Err(Error::Config(format!("theta[{i}] is not finite")));
        }
        let (n, trace) = (theta.len(), p0.trace());
        let mut core = Self {
            theta: theta.to_vec(),
            base: p0,
            base_trace: trace,
            factor: 1.0,
            pending: Array2::zeros((capacity(n), n)),
            used: 0,
            pending_squares: 0.0,
            trace0: trace,
            forgetting,
            rows: 0,
            folds: 0,
            repairs: 0,
            suspect: false,
        };
        core.keep_definite()?;
        core.trace0 = core.base_trace;
        Ok(core)
    }

    pub fn update(&mut self, u: &ArrayView2<f64>, y: &[f64]) -> Result<Vec<Innovation>> {
        let p = self.theta.len();
        if u.ncols() != p || u.nrows() != y.len() {
            let (k, n) = u.dim();
            return Err(Error::Readout(format!(
                "{k} rows of {n} values and {} targets, expected rows of {p}",
                y.len()
            )));
        }
        for (i, row) in u.rows().into_iter().enumerate() {
            if let Some(j) = row.iter().position(|v| !v.is_finite()) {
                return Err(Error::Readout(format!("row {i}, column {j}: the feature is NaN or infinite")));
            }
            // NaN targets fail this comparison too.
            if !(row.iter().all(|v| v.abs() <= LIMIT) && y[i].abs() <= LIMIT) {
                return Err(Error::Readout(format!("row {i}: a feature or the target is too large to learn from")));
            }
        }
        let block = (p / 16).clamp(16, MOST_TOGETHER);
        let mut shown = Vec::with_capacity(y.len());
        let mut start = 0;
        while start < y.len() {
            let end = (start + block).min(y.len());
            self.block(&u.slice(s![start..end, ..]), &y[start..end], &mut shown)?;
            start = end;
        }
        Ok(shown)
    }

    /// One batch: V = P U', S = I + U V = L L', theta += V S^-1 (y - U theta), P -= (V L^-T)(V L^-T)'.
    fn block(&mut self, u: &ArrayView2<f64>, y: &[f64], shown: &mut Vec<Innovation>) -> Result<()> {
        let k = y.len();
        if self.used + k > self.pending.nrows() {
            self.fold()?;
        }
        // Row i is discounted by all rows after it, so a batch equals its rows one by one.
        let discount = self.forgetting.powi(k as i32).max(self.trace() / self.trace0).min(1.0);
        let factor = self.factor / discount;
        let weight = |i: usize| discount.powf((k - 1 - i) as f64 / (2 * k) as f64);

        let mut u = u.to_owned();
        let mut e = vec![0.0; k];
        for (i, mut row) in u.rows_mut().into_iter().enumerate() {
            let predicted: f64 = row.iter().zip(&self.theta).map(|(a, b)| a * b).sum();
            e[i] = weight(i) * (y[i] - predicted);
            row.mapv_inplace(|v| v * weight(i));
        }
        let ut: Vec<T> = u.iter().map(|&v| T::narrow(v)).collect();
        let mut v = self.base.times_rows(&ut);
        if let Some(w) = self.pending.slice(s![..self.used, ..]).as_slice() {
            deflate(w, self.theta.len(), &ut, &mut v);
        }
        let v: Vec<f64> = v.into_iter().map(|v| factor * v.wide()).collect();
        let mut v = Array2::from_shape_vec(u.raw_dim(), v).map_err(|e| Error::Numeric(e.to_string()))?;

        let uv = u.dot(&v.t());
        let (l, spent) = factor_lower(&uv)?;
        // Forward substitution turns e into the whitened innovations and V into M = L^-1 V.
        for i in 0..k {
            if spent[i] {
                v.row_mut(i).fill(0.0);
                continue;
            }
            for j in 0..i {
                e[i] -= l[(i, j)] * e[j];
                let (mut row, earlier) = v.multi_slice_mut((s![i, ..], s![j, ..]));
                row.scaled_add(-l[(i, j)], &earlier);
            }
            e[i] /= l[(i, i)];
            v.row_mut(i).mapv_inplace(|x| x / l[(i, i)]);
        }
        let scale = 1.0 / factor.sqrt();
        let new = v.mapv(|x| T::narrow(scale * x));
        let squares: f64 = new.iter().map(|x| x.wide() * x.wide()).sum();
        if !(squares.is_finite() && e.iter().all(|x| x.is_finite())) {
            return Err(Error::Numeric("the update overflows; nothing was changed".into()));
        }

        for (i, row) in v.rows().into_iter().enumerate() {
            self.theta.iter_mut().zip(row).for_each(|(t, m)| *t += m * e[i]);
            let spread = l[(i, i)];
            shown.push(Innovation { residual: e[i] * spread / weight(i), leverage: spread * spread - 1.0 });
        }
        self.pending.slice_mut(s![self.used..self.used + k, ..]).assign(&new);
        self.used += k;
        self.pending_squares += squares;
        self.factor = factor;
        self.rows += k as u64;
        self.suspect |= spent.contains(&true);
        Ok(())
    }

    /// Writes W and c into B.
    fn fold(&mut self) -> Result<()> {
        let c = T::narrow(self.factor);
        if let Some(rows) = self.pending.slice(s![..self.used, ..]).as_slice() {
            self.base.fold(-c, rows, c);
        }
        self.used = 0;
        self.pending_squares = 0.0;
        self.factor = 1.0;
        self.base_trace = self.base.trace();
        self.folds += 1;
        if self.suspect || self.folds.is_multiple_of(FOLDS_PER_TEST) { self.keep_definite() } else { Ok(()) }
    }

    /// Raises the diagonal of B where rounding has left less than its own size of positive definiteness: without
    /// that, a direction in which P has become negative would slowly run away.
    fn keep_definite(&mut self) -> Result<()> {
        let diag = self.base.diag();
        let largest = diag.iter().copied().fold(0.0, f64::max);
        if !(largest.is_finite() && largest > 0.0) {
            return Err(Error::Numeric("P has lost its diagonal".into()));
        }
        // Rounding each entry on its own is a random symmetric matrix, whose norm grows with sqrt(p).
        let floor = T::EPSILON * largest * (diag.len() as f64).sqrt();
        let mut raise = 2.0 * floor;
        while !self.base.is_positive_definite(floor) {
            self.base.map_diagonal(|_, v| v + T::narrow(raise));
            self.repairs += 1;
            raise *= 4.0;
            if raise > largest {
                return Err(Error::Numeric("P is not positive definite".into()));
            }
        }
        self.suspect = false;
        self.base_trace = self.base.trace();
        if self.forgetting < 1.0 && self.base_trace > self.trace0 {
            self.factor = self.trace0 / self.base_trace;
        }
        Ok(())
    }

    pub fn theta(&self) -> &[f64] {
        &self.theta
    }

    pub fn p(&self) -> Array2<f64> {
        let w = self.pending.slice(s![..self.used, ..]).mapv(|v| v.wide());
        let mut p = self.base.to_dense().mapv(|v| v.wide());
        let mut gram = SymTiles::<f64>::zeros(self.theta.len());
        gram.add_gram(1.0, &w.view(), 0.0);
        p -= &gram.to_dense();
        p * self.factor
    }

    pub fn trace(&self) -> f64 {
        self.factor * (self.base_trace - self.pending_squares)
    }

    pub fn trace0(&self) -> f64 {
        self.trace0
    }

    pub fn rows(&self) -> u64 {
        self.rows
    }

    pub fn repairs(&self) -> u64 {
        self.repairs
    }

    pub fn write_to(&self, file: &mut Writer) {
        let p = self.theta.len();
        let base: Vec<T> = self.base.values().collect();
        let pending: Vec<T> = self.pending.slice(s![..self.used, ..]).iter().copied().collect();
        file.meta(VERSION_KEY, VERSION);
        file.meta("rls_precision", T::NAME);
        file.meta("rls_parameters", p);
        file.meta("rls_pending_rows", self.used);
        file.meta("rls_rows", self.rows);
        file.meta("rls_folds", self.folds);
        file.meta("rls_repairs", self.repairs);
        file.meta("rls_suspect", self.suspect);
        file.f64("rls_theta", &[p], &self.theta);
        T::write(file, "rls_base", &[base.len()], &base);
        T::write(file, "rls_pending", &[self.used, p], &pending);
        let scalars = [self.base_trace, self.factor, self.pending_squares, self.trace0, self.forgetting];
        file.f64("rls_scalars", &[scalars.len()], &scalars);
    }

    pub fn read_from(file: &Reader) -> Result<Self> {
        file.check_version(VERSION_KEY, VERSION)?;
        let p: usize = file.value("rls_parameters")?;
        let used: usize = file.value("rls_pending_rows")?;
        let theta = file.f64("rls_theta", &[p])?;
        let base = T::read(file, "rls_base", &[SymTiles::<T>::stored(p)])?;
        let scalars = file.f64("rls_scalars", &[5])?;
        if used > capacity(p) || scalars[1] <= 0.0 || scalars[3] <= 0.0 || !(0.0..=1.0).contains(&scalars[4]) {
            return Err(file.refuse("the state of the recursive least squares is inconsistent"));
        }
        let mut pending = Array2::zeros((capacity(p), p));
        let stored = T::read(file, "rls_pending", &[used, p])?;
        pending.iter_mut().zip(stored).for_each(|(a, b)| *a = b);
        Ok(Self {
            theta,
            base: SymTiles::from_values(p, base),
            base_trace: scalars[0],
            factor: scalars[1],
            pending,
            used,
            pending_squares: scalars[2],
            trace0: scalars[3],
            forgetting: scalars[4],
            rows: file.value("rls_rows")?,
            folds: file.value("rls_folds")?,
            repairs: file.value("rls_repairs")?,
            suspect: file.value("rls_suspect")?,
        })
    }
}

/// L with I + (UV + (UV)')/2 = L L', and the rows that have nothing left to teach: a pivot is 1 plus a variance, and
/// where rounding has made that variance negative, it and with it the row's covariances are nothing.
fn factor_lower(uv: &Array2<f64>) -> Result<(Array2<f64>, Vec<bool>)> {
    let k = uv.nrows();
    let mut l = Array2::<f64>::eye(k);
    let mut spent = vec![false; k];
    for i in 0..k {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|c| l[(i, c)] * l[(j, c)]).sum();
            let value = (uv[(i, j)] + uv[(j, i)]) / 2.0 - dot;
            if !value.is_finite() {
                return Err(Error::Numeric("the update overflows; nothing was changed".into()));
            }
            if i != j {
                l[(i, j)] = if spent[j] { 0.0 } else { value / l[(j, j)] };
            } else if value > 0.0 {
                l[(i, i)] = (1.0 + value).sqrt();
            } else {
                spent[i] = true;
            }
        }
    }
    Ok((l, spent))
}
