//! Fit a readout: ridge regression by its normal equations, in one pass over rows that need not fit in memory. Rows
//! are summed about a pivot, in f64, and standardised afterwards in the sums; the penalty comes from k-fold
//! cross-validation on the same sums (Golub, Heath and Wahba 1979 discuss the choice; this is the plain k-fold).

use crate::noise::Noise;
use crate::readout::{Meta, Parts, Readout, Target};
use crate::rls::Anchor;
use crate::rows::Rows;
use crate::{Error, Result, linalg, stats};

mod equations;
mod moments;

use equations::Equations;
use moments::Folds;
pub use moments::Moments;

/// What to fit.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// Output budget M in tokens; longer lengths count as M.
    pub max_tokens: u32,
    /// Scale on which the layer is linear.
    pub target: Target,
    /// Penalty in units of standardised features; `None` chooses it by k-fold cross-validation.
    pub lam: Option<f64>,
    /// Folds of the cross-validation.
    pub folds: usize,
    /// Seed of the folds.
    pub seed: u64,
    /// Provenance, stored in the readout.
    pub meta: Meta,
}

impl FitOptions {
    /// Defaults: sqrt target, penalty by 5-fold cross-validation, seed 0.
    pub fn new(max_tokens: u32, meta: Meta) -> Self {
        Self { max_tokens, target: Target::Sqrt, lam: None, folds: 5, seed: 0, meta }
    }
}

/// Decades in which the penalty is looked for; half a decade either side of the best follows.
const DECADES: std::ops::RangeInclusive<i32> = -1..=6;

/// Fits a readout to `rows` (n, d) and `lengths` (n) in tokens. The rows are read twice: the second time for
/// out-of-fold predictions, which give `train_spearman` and the noise stored in the readout.
///
/// # Errors
/// [`Error::Readout`] where rows or lengths cannot be used or the target has no variance, [`Error::Config`] where an
/// option is out of range, [`Error::Numeric`] where the equations cannot be solved.
pub fn fit(rows: &Rows, lengths: &[f64], options: &FitOptions) -> Result<(Readout, Anchor)> {
    let mut moments = Moments::with_folds(rows.ncols(), options.clone(), true)?;
    moments.add(rows, lengths)?;
    let solved = moments.solve()?;
    let (readout, anchor) = solved.parts(None, None)?;
    let Some(folds) = &solved.fold_parameters else { return Ok((readout, anchor)) };

    let target = options.target;
    let out_of_fold: Vec<Readout> =
        folds.iter().map(|theta| solved.readout(theta, None, None)).collect::<Result<_>>()?;
    let assignment = Folds::new(options.seed, folds.len());
    let mut noise = Noise::new(options.max_tokens);
    let mut predicted = Vec::with_capacity(lengths.len());
    for (i, &length) in lengths.iter().enumerate() {
        let readout = &out_of_fold[assignment.of(i)];
        let score = readout.score_row(rows.row(i)?)?;
        predicted.push(f64::from(score));
        let score = target.length(f64::from(score)).max(1.0).sqrt();
        let length = length.min(f64::from(options.max_tokens));
        // What the parameters do not know is in these residuals already, hence no leverage.
        noise.observe(score, length.sqrt() - score, 0.0);
    }
    let mut meta = options.meta.clone();
    meta.train_spearman = stats::spearman(&predicted, lengths);
    solved.parts(Some(meta), Some(noise))
}

/// Solved normal equations, and what a readout is made from.
struct Solved {
    equations: Equations,
    options: FitOptions,
    lam: f64,
    theta: Vec<f64>,
    fold_parameters: Option<Vec<Vec<f64>>>,
}

impl Solved {
    fn readout(&self, theta: &[f64], meta: Option<Meta>, noise: Option<Noise>) -> Result<Readout> {
        let d = theta.len() - 1;
        Readout::new(Parts {
            mean: self.equations.mean.clone(),
            scale: self.equations.scale.clone(),
            weight: theta[..d].iter().map(|&v| v as f32).collect(),
            bias: theta[d] as f32,
            max_tokens: self.options.max_tokens,
            target: self.options.target,
            lam: self.lam,
            clip: None,
            meta: meta.unwrap_or_else(|| self.options.meta.clone()),
            noise,
        })
    }

    fn parts(&self, meta: Option<Meta>, noise: Option<Noise>) -> Result<(Readout, Anchor)> {
        let readout = self.readout(&self.theta, meta, noise)?;
        let e = &self.equations;
        Ok((readout, Anchor::new(e.total.gram.clone(), self.lam, &e.mean, &e.scale)))
    }
}

impl Moments {
    /// The readout and its anchor. Without the rows there are no out-of-fold predictions, so the readout carries no
    /// rank correlation and no noise; [`fit`] gives both.
    ///
    /// # Errors
    /// As [`fit`].
    pub fn finish(self) -> Result<(Readout, Anchor)> {
        self.solve()?.parts(None, None)
    }

    fn solve(self) -> Result<Solved> {
        let (equations, options) = self.into_equations()?;
        let folds = equations.folds.len();
        let lam = match options.lam {
            Some(lam) => lam,
            None => choose(&equations)?,
        };
        let theta = equations.solve(None, lam)?;
        let fold_parameters = (folds > 1)
            .then(|| (0..folds).map(|f| equations.solve(Some(f), lam)).collect::<Result<Vec<_>>>())
            .transpose()?;
        Ok(Solved { equations, options, lam, theta, fold_parameters })
    }
}

/// The penalty with the least squared error over all folds, each predicted by a fit on the others.
fn choose(equations: &Equations) -> Result<f64> {
    let error = |exponent: f64| -> Result<(f64, f64)> {
        let lam = 10f64.powf(exponent);
        let mut sum = 0.0;
        for f in 0..equations.folds.len() {
            match equations.solve_centred(Some(f), lam) {
                Ok(theta) => sum += equations.folds[f].squared_error(&theta),
                // Too weak a penalty for these rows, not a fault.
                Err(Error::Numeric(text)) if text.contains(linalg::NOT_DEFINITE) => {
                    return Ok((f64::INFINITY, exponent));
                }
                Err(other) => return Err(other),
            }
        }
        Ok((sum, exponent))
    };
    let best = |a: (f64, f64), b: (f64, f64)| if b.0 < a.0 { b } else { a };
    let mut found = (f64::INFINITY, f64::from(*DECADES.end()));
    for exponent in DECADES {
        found = best(found, error(f64::from(exponent))?);
    }
    let centre = found.1;
    for exponent in [centre - 0.5, centre + 0.5] {
        found = best(found, error(exponent)?);
    }
    Ok(10f64.powf(found.1))
}
