//! Made data and a plain solver, on which expected values rest.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod traffic;

use std::path::PathBuf;

use ndarray::{Array1, Array2};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// A directory of its own for a test, removed with its content.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("leap-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

pub fn normal(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f64> {
    Array2::from_shape_fn((n, d), |_| rng.sample(StandardNormal))
}

/// Rows with a common direction and unequal spread, as hidden states have, and a 1 at the end.
pub fn correlated(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Array2<f64> {
    let mut u = normal(rng, n, d + 1);
    for mut row in u.rows_mut() {
        let common: f64 = rng.sample(StandardNormal);
        for (j, v) in row.iter_mut().enumerate() {
            let own = 1.0 / (1.0 + (j % 17) as f64 / 4.0);
            *v = own * *v + if j % 3 == 0 { 0.7 * common } else { 0.0 };
        }
        row[d] = 1.0;
    }
    u
}

/// x with A x = b by Cholesky's method, written out.
pub fn solve(a: &Array2<f64>, b: &Array1<f64>) -> Array1<f64> {
    let n = a.nrows();
    let mut l = Array2::<f64>::zeros((n, n));
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|k| l[(i, k)] * l[(j, k)]).sum();
            l[(i, j)] = if i == j { (a[(i, i)] - dot).sqrt() } else { (a[(i, j)] - dot) / l[(j, j)] };
        }
    }
    let mut x = b.clone();
    for i in 0..n {
        let dot: f64 = (0..i).map(|k| l[(i, k)] * x[k]).sum();
        x[i] = (x[i] - dot) / l[(i, i)];
    }
    for i in (0..n).rev() {
        let dot: f64 = (i + 1..n).map(|k| l[(k, i)] * x[k]).sum();
        x[i] = (x[i] - dot) / l[(i, i)];
    }
    x
}

/// A'A by definition, row by row.
pub fn gram(u: &Array2<f64>) -> Array2<f64> {
    let d = u.ncols();
    let mut out = Array2::zeros((d, d));
    for row in u.rows() {
        for i in 0..d {
            for j in 0..d {
                out[(i, j)] += row[i] * row[j];
            }
        }
    }
    out
}

pub fn relative(got: &[f64], expected: &[f64]) -> f64 {
    let difference: f64 = got.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = expected.iter().map(|v| v * v).sum();
    (difference / size).sqrt()
}

/// Whether Cholesky's method, written out, finds only positive pivots.
pub fn positive_definite(a: &Array2<f64>) -> bool {
    let n = a.nrows();
    let mut l = Array2::<f64>::zeros((n, n));
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|k| l[(i, k)] * l[(j, k)]).sum();
            let v = a[(i, j)] - dot;
            if i == j && (v.is_nan() || v <= 0.0) {
                return false;
            }
            l[(i, j)] = if i == j { v.sqrt() } else { v / l[(j, j)] };
        }
    }
    true
}
