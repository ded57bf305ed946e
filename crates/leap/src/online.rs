//! A readout that learns: it predicts, takes the lengths of finished requests, and corrects itself in closed form.
//! [`OnlineReadout`] is a plain value without threads; [`Learner`] gives it a thread of its own and publishes what it
//! knows in snapshots that readers take without a lock.

use serde::{Deserialize, Serialize};

use crate::noise::Noise;
use crate::readout::{Kind, Meta, Parts, Readout, Target};
use crate::rls::{Anchor, Precision, Rls};
use crate::rows::{Row, check_features};
use crate::{Error, Result};

mod censor;
mod file;
mod learner;
mod settled;
mod update;
mod warmup;

pub use censor::censored_mean;
pub use learner::{Learner, Shared, Snapshot};
pub use settled::is_settled;
use update::standardise;
use warmup::Warmup;
pub(crate) use warmup::scale_of;

/// Standardised features of a readout that starts from zero are clipped to ± this: its mean and scale come from few
/// rows.
const CLIP: f32 = 8.0;
/// Prior variance of the bias from zero, in units of the noise variance: wide, yet small enough for f32.
const BIAS_VARIANCE: f64 = 100.0;

/// How it learns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OnlineOptions {
    /// Labels per update; the result does not depend on it, but for censored labels, which are imputed from what is
    /// known when their batch is applied.
    pub batch: usize,
    /// Weight of the past per label, in (0, 1]; 1 forgets nothing.
    pub forgetting: f64,
    /// Number format of P.
    pub precision: Precision,
}

impl Default for OnlineOptions {
    fn default() -> Self {
        Self { batch: 8, forgetting: 1.0, precision: Precision::F32 }
    }
}

/// The length of a finished request, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// It stopped by itself after this many.
    Exact(u32),
    /// It ended at its own limit: its length is at least this.
    Censored(u32),
}

impl Label {
    fn tokens(self) -> u32 {
        match self {
            Self::Exact(n) | Self::Censored(n) => n,
        }
    }
}

/// What is known about a request before it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// m: square root of the predicted length in tokens, whatever the target.
    pub score: f32,
    /// Whether a readout gave it. If not, it is the running mean of finished lengths, the same for every request.
    pub known: bool,
}

/// What is saved as it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Facts {
    d: usize,
    max_tokens: u32,
    lam: f64,
    kind: Kind,
    batch: usize,
    forgetting: f64,
    double: bool,
    anchored: bool,
    known: bool,
    updates: u64,
    finished: u64,
    finished_tokens: u64,
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one of them in a readout, and it grows into the larger")]
enum Stage {
    Warming(Warmup),
    Ready { rls: Rls, readout: Readout },
}

/// A readout with its recursive least squares, noise, and the labels that wait for the next update.
#[derive(Clone, Debug)]
pub struct OnlineReadout {
    facts: Facts,
    stage: Stage,
    noise: Noise,
    /// Standardised rows with their 1, and labels.
    queue: Vec<(Vec<f64>, Label)>,
}

impl OnlineReadout {
    /// Starts from a fitted readout. With its anchor, new labels weigh as much as the training rows did; without, P0
    /// is I / lambda around the readout, which then moves faster ([`Self::anchored`] tells).
    ///
    /// # Errors
    /// [`Error::Readout`] where the anchor is not that of the readout, [`Error::Numeric`] where it cannot be inverted,
    /// [`Error::Config`] where an option is out of range.
    pub fn new(readout: Readout, anchor: Option<Anchor>, options: OnlineOptions) -> Result<Self> {
        check(&options)?;
        let p = readout.parts();
        let mut theta: Vec<f64> = p.weight.iter().map(|&w| f64::from(w)).collect();
        theta.push(f64::from(p.bias));
        let rls = match &anchor {
            Some(anchor) => {
                anchor.check(&readout)?;
                Rls::with_anchor(&theta, anchor, options.forgetting, options.precision)?
            }
            None if p.lam > 0.0 => {
                let p0 = vec![1.0 / p.lam; theta.len()];
                Rls::with_diagonal(&theta, &p0, options.forgetting, options.precision)?
            }
            None => return Err(Error::Config("without an anchor, lam of the readout must be above 0".into())),
        };
        let noise = readout.noise().cloned().unwrap_or_else(|| Noise::new(p.max_tokens));
        let mut facts = facts(readout.d(), p.max_tokens, p.lam, p.meta.kind, options);
        facts.anchored = anchor.is_some();
        facts.known = true;
        Ok(Self { facts, stage: Stage::Ready { rls, readout }, noise, queue: Vec::new() })
    }

    /// Starts from nothing, for `d` features. Mean and scale come from the first `warmup` rows and then stay; the
    /// target is sqrt.
    ///
    /// # Errors
    /// [`Error::Config`] where an option is out of range.
    pub fn from_zero(
        d: usize,
        max_tokens: u32,
        lam: f64,
        warmup: usize,
        kind: Kind,
        options: OnlineOptions,
    ) -> Result<Self> {
        check(&options)?;
        check_features(d)?;
        if max_tokens == 0 || warmup < 2 {
            return Err(Error::Config(format!(
                "max_tokens = {max_tokens}, warmup = {warmup}: must be at least 1 and 2"
            )));
        }
        if !(lam.is_finite() && lam > 0.0) {
            return Err(Error::Config(format!("lam is {lam}, must be finite and above 0")));
        }
        Ok(Self {
            facts: facts(d, max_tokens, lam, kind, options),
            stage: Stage::Warming(Warmup::new(d, warmup)),
            noise: Noise::new(max_tokens),
            queue: Vec::new(),
        })
    }

    /// The same with updates of `batch` labels, at least 1.
    #[must_use]
    pub fn with_batch(mut self, batch: usize) -> Self {
        self.facts.batch = batch.max(1);
        self
    }

    /// The estimate for one request, from its row of d features. During the warm-up the row also counts for mean and
    /// scale.
    ///
    /// # Errors
    /// [`Error::Readout`] where the width is wrong or a feature is NaN or infinite; nothing is changed then.
    pub fn estimate(&mut self, row: Row) -> Result<Estimate> {
        if let Stage::Warming(warmup) = &mut self.stage {
            warmup.add(&warmup::usable(row, self.facts.d)?);
            if warmup.is_full() {
                self.end_warmup()?;
            }
        }
        self.current(row)
    }

    fn current(&self, row: Row) -> Result<Estimate> {
        match &self.stage {
            Stage::Ready { readout, .. } if self.facts.known => Ok(known(readout, row)?),
            _ => {
                row.check(0, self.facts.d)?;
                Ok(Estimate { score: self.running_score(), known: false })
            }
        }
    }

    /// Square root of the mean of finished lengths; of a quarter of M before any request has finished.
    fn running_score(&self) -> f32 {
        let f = &self.facts;
        let mean = match f.finished {
            0 => f64::from(f.max_tokens) / 4.0,
            n => f.finished_tokens as f64 / n as f64,
        };
        mean.max(1.0).sqrt() as f32
    }

    /// Takes the length of a finished request. The label waits until a batch is full. Returns the number of updates
    /// applied: 0 or 1, more only where this ends the warm-up.
    ///
    /// # Errors
    /// [`Error::Readout`] where the row or the length cannot be used; nothing is changed then. [`Error::Numeric`]
    /// where an update fails; its batch is lost and nothing else.
    pub fn observe(&mut self, row: Row, label: Label) -> Result<usize> {
        row.check(0, self.facts.d)?;
        if label.tokens() == 0 {
            return Err(Error::Readout("a length must be at least 1 token".into()));
        }
        let applied = match &mut self.stage {
            Stage::Warming(warmup) => {
                warmup.keep(warmup::usable(row, self.facts.d)?, label);
                let full = warmup.is_full();
                self.count(label);
                if full { self.end_warmup()? } else { 0 }
            }
            Stage::Ready { readout, .. } => {
                let mut row = row.to_f64_vec();
                standardise(readout, &mut row)?;
                self.queue.push((row, label));
                self.count(label);
                self.drain()?
            }
        };
        Ok(applied)
    }

    fn count(&mut self, label: Label) {
        self.facts.finished += 1;
        self.facts.finished_tokens += u64::from(label.tokens().min(self.facts.max_tokens));
    }

    fn end_warmup(&mut self) -> Result<usize> {
        let Stage::Warming(warmup) = &mut self.stage else { return Ok(0) };
        let (d, f) = (self.facts.d, &self.facts);
        let (mean, scale) = warmup.mean_and_scale();
        let kept = std::mem::take(&mut warmup.kept);
        let readout = Readout::new(Parts {
            mean,
            scale,
            weight: vec![0.0; d],
            bias: 0.0,
            max_tokens: f.max_tokens,
            target: Target::Sqrt,
            lam: f.lam,
            clip: Some(CLIP),
            meta: Meta::new(f.kind),
            noise: None,
        })?;
        let mut p0 = vec![1.0 / f.lam; d];
        p0.push(BIAS_VARIANCE);
        let precision = if f.double { Precision::F64 } else { Precision::F32 };
        let rls = Rls::with_diagonal(&vec![0.0; d + 1], &p0, f.forgetting, precision)?;
        for (mut row, label) in kept {
            standardise(&readout, &mut row)?;
            self.queue.push((row, label));
        }
        self.stage = Stage::Ready { rls, readout };
        self.drain()
    }

    /// Where the `length` of one request lies in its predicted distribution ([`Noise::pit`]); the row counts as for
    /// [`Self::estimate`].
    ///
    /// # Errors
    /// As [`Self::estimate`].
    pub fn pit(&mut self, row: Row, length: f64) -> Result<(f64, f64)> {
        let score = self.estimate(row)?.score;
        Ok(self.noise.pit(f64::from(score), length))
    }

    /// Noise of the predictions.
    pub fn noise(&self) -> &Noise {
        &self.noise
    }

    /// The readout as it stands, with its noise.
    ///
    /// # Errors
    /// [`Error::Readout`] before the warm-up has ended.
    pub fn readout(&self) -> Result<Readout> {
        match &self.stage {
            Stage::Ready { readout, .. } => {
                let mut parts = readout.parts().clone();
                parts.noise = Some(self.noise.clone());
                Readout::new(parts)
            }
            Stage::Warming(w) => {
                Err(Error::Readout(format!("there is no readout yet: {} of {} rows seen", w.seen(), w.limit())))
            }
        }
    }

    /// Output budget M in tokens.
    pub fn max_tokens(&self) -> u32 {
        self.facts.max_tokens
    }

    /// Number of features.
    pub fn d(&self) -> usize {
        self.facts.d
    }

    /// Whether P0 came from the training rows' Gram matrix.
    pub fn anchored(&self) -> bool {
        self.facts.anchored
    }

    /// Whether estimates come from a readout yet.
    pub fn known(&self) -> bool {
        self.facts.known
    }

    /// Whether mean and scale are still being gathered.
    pub fn warming(&self) -> bool {
        matches!(self.stage, Stage::Warming(_))
    }

    /// Updates applied so far.
    pub fn updates(&self) -> u64 {
        self.facts.updates
    }

    /// Labels that wait for the next update.
    pub fn waiting(&self) -> usize {
        match &self.stage {
            Stage::Warming(w) => w.kept.len(),
            Stage::Ready { .. } => self.queue.len(),
        }
    }

    /// The recursive least squares, once mean and scale are known.
    pub fn rls(&self) -> Option<&Rls> {
        match &self.stage {
            Stage::Ready { rls, .. } => Some(rls),
            Stage::Warming(_) => None,
        }
    }
}

fn known(readout: &Readout, row: Row) -> Result<Estimate> {
    Ok(Estimate { score: readout.root_row(row)?, known: true })
}

fn check(options: &OnlineOptions) -> Result<()> {
    if options.batch == 0 {
        return Err(Error::Config("batch must be at least 1".into()));
    }
    if !(options.forgetting > 0.0 && options.forgetting <= 1.0) {
        return Err(Error::Config(format!("forgetting is {}, must be above 0 and at most 1", options.forgetting)));
    }
    Ok(())
}

fn facts(d: usize, max_tokens: u32, lam: f64, kind: Kind, options: OnlineOptions) -> Facts {
    Facts {
        d,
        max_tokens,
        lam,
        kind,
        batch: options.batch,
        forgetting: options.forgetting,
        double: options.precision == Precision::F64,
        anchored: false,
        known: false,
        updates: 0,
        finished: 0,
        finished_tokens: 0,
    }
}
