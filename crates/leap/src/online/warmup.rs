//! Mean and scale of features from the first rows seen.

use super::Label;
use crate::rows::Row;
use crate::{Error, Result};

/// Larger features have a deviation that f32, in which mean and scale are stored, may not hold.
const LIMIT: f64 = 1e30;

/// The row in f64, if mean and scale can be taken from it.
pub(super) fn usable(row: Row, d: usize) -> Result<Vec<f64>> {
    row.check(0, d)?;
    let row = row.to_f64_vec();
    match row.iter().position(|v| v.abs() > LIMIT) {
        Some(column) => Err(Error::Readout(format!("column {column}: {:.1e} is too large for a feature", row[column]))),
        None => Ok(row),
    }
}

/// Welford's running mean and variance of every feature (Knuth, TAOCP vol. 2, 4.2.2), and the labels seen meanwhile.
#[derive(Clone, Debug)]
pub(super) struct Warmup {
    pub rows: usize,
    pub limit: usize,
    pub mean: Vec<f64>,
    pub squares: Vec<f64>,
    pub kept: Vec<(Vec<f64>, Label)>,
}

impl Warmup {
    pub fn new(d: usize, limit: usize) -> Self {
        Self { rows: 0, limit, mean: vec![0.0; d], squares: vec![0.0; d], kept: Vec::new() }
    }

    pub fn add(&mut self, row: &[f64]) {
        self.rows += 1;
        let n = self.rows as f64;
        for ((mean, squares), &x) in self.mean.iter_mut().zip(&mut self.squares).zip(row) {
            let delta = x - *mean;
            *mean += delta / n;
            *squares += delta * (x - *mean);
        }
    }

    /// Keeps a label for after the warm-up. Labels are bounded by its length: where whole batches of them arrive and
    /// no estimate is ever asked for, their own rows end it.
    pub fn keep(&mut self, row: Vec<f64>, label: Label) {
        self.kept.push((row, label));
        if self.kept.len() >= self.limit && self.rows < self.limit {
            let kept = std::mem::take(&mut self.kept);
            kept.iter().for_each(|(row, _)| self.add(row));
            self.kept = kept;
        }
    }

    pub fn is_full(&self) -> bool {
        self.rows >= self.limit
    }

    pub fn seen(&self) -> usize {
        self.rows
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn mean_and_scale(&self) -> (Vec<f32>, Vec<f32>) {
        let n = self.rows.max(1) as f64;
        let mean = self.mean.iter().map(|&m| m as f32).collect();
        let scale = self.mean.iter().zip(&self.squares).map(|(&m, &s)| scale_of(m, s / n).unwrap_or(1.0)).collect();
        (mean, scale)
    }
}

/// The scale of a feature with this mean and variance; `None` where it is constant as far as f32 can tell.
pub(crate) fn scale_of(mean: f64, variance: f64) -> Option<f32> {
    let deviation = variance.max(0.0).sqrt();
    (deviation > 1e-7 * mean.abs() && deviation > 1e-30).then_some(deviation as f32)
}
