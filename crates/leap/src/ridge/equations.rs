//! Normal equations in standardised features, from sums about a pivot.

use super::moments::Sums;
use crate::linalg::{self, SymTiles};
use crate::online::scale_of;
use crate::{Error, Result};

/// Us'Us, Us'y and y'y over some rows; u is the standardised row with its 1.
#[derive(Clone)]
pub(super) struct System {
    pub gram: SymTiles<f64>,
    pub moment: Vec<f64>,
    pub squares: f64,
}

impl System {
    /// Sum of (y - u'theta)^2.
    pub fn squared_error(&self, theta: &[f64]) -> f64 {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        (self.squares - 2.0 * dot(theta, &self.moment) + dot(theta, &self.gram.plain_times(theta))).max(0.0)
    }
}

/// The equations of all rows and of each fold.
pub(super) struct Equations {
    pub mean: Vec<f32>,
    pub scale: Vec<f32>,
    pub total: System,
    pub folds: Vec<System>,
    /// y is taken about this in all systems.
    centre: f64,
}

impl Equations {
    pub fn new(folds: &[Sums], pivot: &[f64], y_pivot: f64, probe: &[f64]) -> Result<Self> {
        let d = pivot.len();
        let mut total = Sums::new(d);
        folds.iter().for_each(|f| total.merge(1.0, f));
        let size: f64 = total.probed.iter().map(|v| v * v).sum::<f64>().sqrt();
        linalg::check("Gram matrix", &total.xx.plain_times(probe), &total.probed, size, 1e-9)?;

        let n = total.n;
        let variance = total.yy / n - (total.y / n) * (total.y / n);
        if variance <= 1e-12 * (y_pivot + total.y / n).powi(2) {
            return Err(Error::Readout(format!("the target has no variance: all {n} lengths are the same")));
        }
        let centre = y_pivot + total.y / n;
        let diagonal = total.xx.diag();
        let mut mean = Vec::with_capacity(d);
        let mut scale = Vec::with_capacity(d);
        let mut constant = vec![false; d];
        for j in 0..d {
            let offset = total.x[j] / n;
            mean.push((pivot[j] + offset) as f32);
            let found = scale_of(pivot[j] + offset, diagonal[j] / n - offset * offset);
            constant[j] = found.is_none();
            scale.push(found.unwrap_or(1.0));
        }
        // About the mean and scale as the file will hold them, in f32: the fit then answers for their rounding.
        let shift: Vec<f64> = mean.iter().zip(pivot).map(|(&m, p)| f64::from(m) - p).collect();
        let inverse: Vec<f64> =
            scale.iter().zip(&constant).map(|(&s, &c)| if c { 0.0 } else { 1.0 / f64::from(s) }).collect();
        let systems = |sums: &Sums| system(sums, &shift, &inverse, centre - y_pivot);
        Ok(Self { total: systems(&total), folds: folds.iter().map(systems).collect(), mean, scale, centre })
    }

    /// Parameters (d + 1, the bias last) of all rows, or of all but those of fold `without`.
    pub fn solve(&self, without: Option<usize>, lam: f64) -> Result<Vec<f64>> {
        let mut theta = self.solve_centred(without, lam)?;
        if let Some(bias) = theta.last_mut() {
            *bias += self.centre;
        }
        Ok(theta)
    }

    /// As [`Self::solve`], with y about its centre, as [`System::squared_error`] takes it.
    pub fn solve_centred(&self, without: Option<usize>, lam: f64) -> Result<Vec<f64>> {
        let mut gram = self.total.gram.clone();
        let mut moment = self.total.moment.clone();
        if let Some(fold) = without.map(|f| &self.folds[f]) {
            gram.add(-1.0, &fold.gram);
            moment.iter_mut().zip(&fold.moment).for_each(|(a, b)| *a -= b);
        }
        let bias = gram.n() - 1;
        gram.map_diagonal(|i, v| if i == bias { v } else { v + lam });
        linalg::solve("ridge", &gram, &moment)
    }
}

/// Moves sums about the pivot to sums about pivot + `shift` (y: + `dy`), scales them, and adds the row of the bias.
fn system(sums: &Sums, shift: &[f64], inverse: &[f64], dy: f64) -> System {
    let (d, n) = (shift.len(), sums.n);
    let xx = sums.xx.to_dense();
    let first = |j: usize| inverse[j] * (sums.x[j] - n * shift[j]);
    let gram = SymTiles::from_fn(d + 1, |i, j| match (i == d, j == d) {
        (true, true) => n,
        (true, false) => first(j),
        (false, true) => first(i),
        (false, false) => {
            let moved = xx[(i, j)] - shift[i] * sums.x[j] - sums.x[i] * shift[j] + n * shift[i] * shift[j];
            inverse[i] * inverse[j] * moved
        }
    });
    let moment = |j: usize| inverse[j] * (sums.xy[j] - dy * sums.x[j] - shift[j] * sums.y + n * shift[j] * dy);
    let moment = (0..d).map(moment).chain([sums.y - n * dy]).collect();
    System { gram, moment, squares: sums.yy - 2.0 * dy * sums.y + n * dy * dy }
}
