//! Sums over rows, fold by fold.

use ndarray::Array2;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::FitOptions;
use super::equations::Equations;
use crate::linalg::{SymTiles, probe};
use crate::rows::{Rows, check_features};
use crate::{Error, Result};

/// Values of a block of rows in f64: bounds the scratch memory to 32 MiB.
const BLOCK_VALUES: usize = 4 << 20;

/// Which fold a row belongs to: every run of `folds` rows is spread over all folds in a random order, so folds are
/// equally large and do not depend on how rows are handed over.
pub(super) struct Folds {
    seed: u64,
    folds: usize,
}

impl Folds {
    pub fn new(seed: u64, folds: usize) -> Self {
        Self { seed, folds }
    }

    pub fn of(&self, row: usize) -> usize {
        if self.folds == 1 {
            return 0;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream((row / self.folds) as u64);
        let mut order: Vec<usize> = (0..self.folds).collect();
        order.shuffle(&mut rng);
        order[row % self.folds]
    }
}

/// Sums over the rows of one fold, with x and y taken about the pivot.
#[derive(Clone)]
pub(super) struct Sums {
    pub n: f64,
    pub x: Vec<f64>,
    pub y: f64,
    pub xx: SymTiles<f64>,
    pub xy: Vec<f64>,
    pub yy: f64,
    /// X'(X v) for the probe v, without the linear algebra library: X'X must agree with it.
    pub probed: Vec<f64>,
}

impl Sums {
    pub fn new(d: usize) -> Self {
        let zeros = || vec![0.0; d];
        Self { n: 0.0, x: zeros(), y: 0.0, xx: SymTiles::zeros(d), xy: zeros(), yy: 0.0, probed: zeros() }
    }

    fn add(&mut self, x: &Array2<f64>, y: &[f64], v: &[f64]) {
        self.n += y.len() as f64;
        for (row, &y) in x.rows().into_iter().zip(y) {
            self.y += y;
            self.yy += y * y;
            let along: f64 = row.iter().zip(v).map(|(a, b)| a * b).sum();
            for (j, &a) in row.iter().enumerate() {
                self.x[j] += a;
                self.xy[j] += a * y;
                self.probed[j] += a * along;
            }
        }
        self.xx.add_gram(1.0, &x.view(), 1.0);
    }

    /// self += alpha other.
    pub fn merge(&mut self, alpha: f64, other: &Self) {
        let axpy = |a: &mut [f64], b: &[f64]| a.iter_mut().zip(b).for_each(|(a, b)| *a += alpha * b);
        self.n += alpha * other.n;
        self.y += alpha * other.y;
        self.yy += alpha * other.yy;
        axpy(&mut self.x, &other.x);
        axpy(&mut self.xy, &other.xy);
        axpy(&mut self.probed, &other.probed);
        self.xx.add(alpha, &other.xx);
    }
}

/// Everything that a fit needs of its rows: moments of d features and the target. Memory is d^2 / 2 doubles a fold;
/// rows are handed over in any number of parts, once.
pub struct Moments {
    d: usize,
    options: FitOptions,
    pivot: Option<(Vec<f64>, f64)>,
    folds: Vec<Sums>,
    assignment: Folds,
    probe: Vec<f64>,
    rows: usize,
}

impl Moments {
    /// Empty moments of `d` features.
    ///
    /// # Errors
    /// [`Error::Config`] where `d` or an option is out of range.
    pub fn new(d: usize, options: FitOptions) -> Result<Self> {
        let folds = options.lam.is_none();
        Self::with_folds(d, options, folds)
    }

    pub(super) fn with_folds(d: usize, options: FitOptions, fold: bool) -> Result<Self> {
        check_features(d)?;
        if options.max_tokens == 0 {
            return Err(Error::Config("max_tokens must be at least 1".into()));
        }
        if let Some(lam) = options.lam.filter(|lam| !(lam.is_finite() && *lam >= 0.0)) {
            return Err(Error::Config(format!("lam is {lam}, must be finite and not negative")));
        }
        if options.folds < 2 || options.folds > 1000 {
            return Err(Error::Config(format!("folds is {}, must be 2 to 1000", options.folds)));
        }
        let count = if fold { options.folds } else { 1 };
        Ok(Self {
            d,
            pivot: None,
            folds: vec![Sums::new(d); count],
            assignment: Folds::new(options.seed, count),
            probe: probe(d),
            rows: 0,
            options,
        })
    }

    /// Rows seen.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds `rows` (k, d) with their `lengths` (k) in tokens.
    ///
    /// # Errors
    /// [`Error::Readout`] naming the first row (counted over all parts) whose width, features or length cannot be
    /// used; nothing of this part is added then.
    pub fn add(&mut self, rows: &Rows, lengths: &[f64]) -> Result<()> {
        rows.check_width(self.d)?;
        if rows.nrows() != lengths.len() {
            return Err(Error::Readout(format!("{} rows of features, {} lengths", rows.nrows(), lengths.len())));
        }
        for (i, &length) in lengths.iter().enumerate() {
            rows.row(i)?.check(self.rows + i, self.d)?;
            if !(length.is_finite() && length >= 1.0) {
                let row = self.rows + i;
                return Err(Error::Readout(format!("row {row}: the length is {length}, must be at least 1 token")));
            }
        }
        let cap = f64::from(self.options.max_tokens);
        let y: Vec<f64> = lengths.iter().map(|&l| self.options.target.of(l.min(cap))).collect();
        let block = (BLOCK_VALUES / self.d).clamp(64, 8192);
        for start in (0..y.len()).step_by(block) {
            self.add_block(rows, start, &y[start..(start + block).min(y.len())])?;
        }
        Ok(())
    }

    fn add_block(&mut self, rows: &Rows, start: usize, y: &[f64]) -> Result<()> {
        let mut x = Array2::<f64>::zeros((y.len(), self.d));
        for (i, mut out) in x.rows_mut().into_iter().enumerate() {
            if let Some(out) = out.as_slice_mut() {
                rows.row(start + i)?.copy_to_f64(out);
            }
        }
        let (pivot, y_pivot) = self.pivot.get_or_insert_with(|| {
            let n = y.len() as f64;
            (x.sum_axis(ndarray::Axis(0)).iter().map(|s| s / n).collect(), y.iter().sum::<f64>() / n)
        });
        let mut members = vec![Vec::new(); self.folds.len()];
        for (i, mut row) in x.rows_mut().into_iter().enumerate() {
            row.iter_mut().zip(&*pivot).for_each(|(v, p)| *v -= p);
            members[self.assignment.of(self.rows + i)].push(i);
        }
        for (sums, members) in self.folds.iter_mut().zip(&members) {
            let part = x.select(ndarray::Axis(0), members);
            let y: Vec<f64> = members.iter().map(|&i| y[i] - *y_pivot).collect();
            sums.add(&part, &y, &self.probe);
        }
        self.rows += y.len();
        Ok(())
    }

    pub(super) fn into_equations(self) -> Result<(Equations, FitOptions)> {
        let (Some((pivot, y_pivot)), true) = (self.pivot, self.rows >= 2) else {
            return Err(Error::Readout(format!("a fit needs at least 2 rows, there are {}", self.rows)));
        };
        if self.folds.len() > self.rows {
            return Err(Error::Readout(format!("{} rows do not fill {} folds", self.rows, self.folds.len())));
        }
        Ok((Equations::new(&self.folds, &pivot, y_pivot, &self.probe)?, self.options))
    }
}
