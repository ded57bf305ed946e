//! Requests for readouts that learn.

use leap::online::{OnlineOptions, OnlineReadout};
use leap::readout::{Kind, Meta, Readout};
use leap::ridge::{FitOptions, fit};
use leap::rls::Precision;
use leap::rows::{Row, Rows};
use ndarray::Array2;
use rand::RngExt;
use rand_distr::StandardNormal;

use super::{normal, rng};

pub const M: u32 = 4096;

/// Rows with unequal means and scales, and lengths that follow them with noise.
pub fn traffic(seed: u64, n: usize, d: usize) -> (Array2<f32>, Vec<u32>) {
    let mut r = rng(seed);
    let u = normal(&mut r, n, d);
    let w: Vec<f64> = (0..d).map(|_| r.random_range(-1.5..1.5)).collect();
    let x = Array2::from_shape_fn((n, d), |(i, j)| (u[(i, j)] * (1.0 + j as f64) + 10.0 * j as f64) as f32);
    let lengths = (0..n)
        .map(|i| {
            let noise: f64 = r.sample(StandardNormal);
            let y = 22.0 + (0..d).map(|j| w[j] * u[(i, j)]).sum::<f64>() + 4.0 * noise;
            y.clamp(1.0, 64.0).powi(2).round().max(1.0) as u32
        })
        .collect();
    (x, lengths)
}

pub fn row(x: &Array2<f32>, i: usize) -> Row<'_> {
    Rows::F32(x.view()).row(i).unwrap()
}

pub fn from_zero(d: usize, warmup: usize, batch: usize, precision: Precision) -> OnlineReadout {
    let options = OnlineOptions { batch, precision, ..OnlineOptions::default() };
    OnlineReadout::from_zero(d, M, 10.0, warmup, Kind::State, options).unwrap()
}

pub fn fitted(x: &Array2<f32>, lengths: &[u32]) -> (Readout, leap::rls::Anchor) {
    let lengths: Vec<f64> = lengths.iter().map(|&l| f64::from(l)).collect();
    let options = FitOptions { lam: Some(10.0), ..FitOptions::new(M, Meta::new(Kind::State)) };
    fit(&Rows::F32(x.view()), &lengths, &options).unwrap()
}
