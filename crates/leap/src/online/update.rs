//! How labels become an update.

use super::{Label, OnlineReadout, Stage, censored_mean};
use crate::readout::Readout;
use crate::{Error, Result};

/// Standardised features past this cannot be squared and summed in f32.
const LIMIT: f64 = 1e12;

impl OnlineReadout {
    /// Applies the labels that wait, be they fewer than a batch. During the warm-up they have to stay.
    ///
    /// # Errors
    /// [`Error::Numeric`] as [`Self::observe`].
    pub fn flush(&mut self) -> Result<usize> {
        let applied = self.drain()?;
        if self.queue.is_empty() {
            return Ok(applied);
        }
        let batch = std::mem::take(&mut self.queue);
        self.apply(batch)?;
        Ok(applied + 1)
    }

    pub(super) fn drain(&mut self) -> Result<usize> {
        let mut applied = 0;
        while self.queue.len() >= self.facts.batch {
            let rest = self.queue.split_off(self.facts.batch);
            let batch = std::mem::replace(&mut self.queue, rest);
            self.apply(batch)?;
            applied += 1;
        }
        Ok(applied)
    }

    /// One update of the recursive least squares, and the noise from what each row showed beforehand.
    fn apply(&mut self, batch: Vec<(Vec<f64>, Label)>) -> Result<()> {
        let Stage::Ready { rls, readout } = &mut self.stage else { return Ok(()) };
        let (k, p) = (batch.len(), self.facts.d + 1);
        let (target, m) = (readout.target(), f64::from(self.facts.max_tokens));
        let (low, high) = (target.of(1.0), target.of(m));
        let u: Vec<f64> = batch.iter().flat_map(|(row, _)| row.iter().copied()).collect();
        let u = ndarray::Array2::from_shape_vec((k, p), u).map_err(|e| Error::Numeric(e.to_string()))?;
        let y: Vec<f64> = u
            .rows()
            .into_iter()
            .zip(&batch)
            .map(|(row, (_, label))| match *label {
                Label::Censored(c) if f64::from(c) < m => {
                    let score: f64 = row.iter().zip(rls.theta()).map(|(a, b)| a * b).sum();
                    let score = target.length(score.clamp(low, high)).sqrt();
                    let y = censored_mean(score, self.noise.sigma(score), f64::from(c).sqrt(), m.sqrt());
                    target.of(y * y)
                }
                label => target.of(f64::from(label.tokens()).min(m)),
            })
            .collect();
        let shown = rls.update(&u.view(), &y)?;
        for ((y, innovation), (_, label)) in y.iter().zip(&shown).zip(&batch) {
            let score = target.length((y - innovation.residual).clamp(low, high)).sqrt();
            let residual = target.length(*y).sqrt() - score;
            // A limit below the prediction says nothing of the spread; one above it is a miss of at least that much.
            let silent = matches!(label, Label::Censored(c) if f64::from(*c).min(m).sqrt() < score);
            if !silent {
                self.noise.observe(score, residual, innovation.leverage);
            }
        }
        let mut parts = readout.parts().clone();
        let theta = rls.theta();
        parts.weight = theta[..p - 1].iter().map(|&v| v as f32).collect();
        parts.bias = theta[p - 1] as f32;
        *readout = Readout::new(parts)?;
        self.facts.known = true;
        self.facts.updates += 1;
        Ok(())
    }
}

/// x -> (x - mean) / scale, clipped where the readout clips, and a 1 for the bias.
pub(super) fn standardise(readout: &Readout, row: &mut Vec<f64>) -> Result<()> {
    let p = readout.parts();
    for (i, ((x, &mean), &scale)) in row.iter_mut().zip(&p.mean).zip(&p.scale).enumerate() {
        *x = (*x - f64::from(mean)) / f64::from(scale);
        if let Some(clip) = p.clip {
            *x = x.clamp(-f64::from(clip), f64::from(clip));
        }
        if x.abs() > LIMIT {
            return Err(Error::Readout(format!("column {i}: the feature is {x:.1e} scales off its mean")));
        }
    }
    row.push(1.0);
    Ok(())
}
