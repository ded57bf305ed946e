//! The seeded projection: entries +-1/sqrt(dim), whose signs are the bits of a ChaCha8 stream.

use half::f16;
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut2};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::linalg::limit_threads;
use crate::{Error, Result};

/// Rows of the embedding that are converted and projected at a time.
const CHUNK: usize = 512;

/// d x dim signs. The key of the stream is the seed in little-endian bytes, then zeros; row i takes ceil(dim / 32)
/// words of 32 bits, and bit j % 32 of word j / 32 is the sign of entry (i, j): 1 is plus.
#[derive(Debug)]
pub(super) struct Projection {
    pub d: usize,
    pub dim: usize,
    pub seed: u64,
    signs: Vec<u32>,
}

impl Projection {
    pub fn new(d: usize, dim: usize, seed: u64) -> Result<Self> {
        if d == 0 || dim == 0 || d > 1 << 20 || dim > 1 << 16 {
            return Err(Error::Config(format!("a projection from {d} to {dim} dimensions is not possible")));
        }
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        let signs = (0..d * dim.div_ceil(32)).map(|_| rng.next_u32()).collect();
        Ok(Self { d, dim, seed, signs })
    }

    fn sign(&self, i: usize, j: usize) -> f64 {
        let word = self.signs[i * self.dim.div_ceil(32) + j / 32];
        if word >> (j % 32) & 1 == 1 { 1.0 } else { -1.0 }
    }

    /// x R for x (d).
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; self.dim];
        for (i, &x) in x.iter().enumerate() {
            out.iter_mut().enumerate().for_each(|(j, o)| *o += self.sign(i, j) * x);
        }
        let factor = 1.0 / (self.dim as f64).sqrt();
        out.iter_mut().for_each(|v| *v *= factor);
        out
    }

    /// E R (vocabulary, dim) in f16; `read(i, out)` fills row i of E (vocabulary, d).
    pub fn table(&self, vocabulary: usize, read: impl Fn(usize, &mut [f32]) -> Result<()> + Sync) -> Result<Vec<f16>> {
        if vocabulary == 0 {
            return Err(Error::Readout("the embedding table is empty".into()));
        }
        limit_threads();
        // Signs alone in the product, so that its terms are exact; the factor comes after.
        let signs = Array2::from_shape_fn((self.d, self.dim), |(i, j)| self.sign(i, j) as f32);
        let factor = 1.0 / (self.dim as f32).sqrt();
        let mut table = vec![f16::ZERO; vocabulary * self.dim];
        table.par_chunks_mut(CHUNK * self.dim).enumerate().try_for_each(|(chunk, out)| {
            let rows = out.len() / self.dim;
            let mut e = vec![0f32; rows * self.d];
            for (i, row) in e.chunks_exact_mut(self.d).enumerate() {
                read(chunk * CHUNK + i, row)?;
            }
            let mut product = vec![0f32; out.len()];
            let shape = |e: ndarray::ShapeError| Error::Numeric(e.to_string());
            let e = ndarray::ArrayView2::from_shape((rows, self.d), &e).map_err(shape)?;
            let mut target = ArrayViewMut2::from_shape((rows, self.dim), &mut product).map_err(shape)?;
            general_mat_mul(factor, &e, &signs, 0.0, &mut target);
            for (i, (out, &v)) in out.iter_mut().zip(&product).enumerate() {
                *out = f16::from_f32(v);
                if !out.is_finite() {
                    let row = chunk * CHUNK + i / self.dim;
                    return Err(Error::Readout(format!(
                        "row {row} of the embedding is too large for f16 once projected"
                    )));
                }
            }
            Ok(())
        })?;
        Ok(table)
    }
}
