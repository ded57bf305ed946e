//! What the training data of a readout weigh: their Gram matrix, kept in a file beside the readout.

use std::path::{Path, PathBuf};

use crate::linalg::{self, SymTiles};
use crate::readout::Readout;
use crate::tensors::{self, Reader, Writer};
use crate::{Error, Result};

const VERSION_KEY: &str = "leap_anchor_version";
const VERSION: &str = "1";

/// The Gram matrix Us'Us (d + 1 x d + 1, the bias last) of the standardised training rows, with the penalty and a
/// checksum of the readout's mean and scale, without which it means nothing.
#[derive(Clone, Debug)]
pub struct Anchor {
    gram: SymTiles<f64>,
    lam: f64,
    standardisation: String,
}

/// FNV-1a over the bytes of mean and scale.
fn checksum(mean: &[f32], scale: &[f32]) -> String {
    let bytes = mean.iter().chain(scale).flat_map(|v| v.to_le_bytes());
    format!("{:016x}", tensors::fnv1a(tensors::FNV_BASIS, bytes))
}

impl Anchor {
    pub(crate) fn new(gram: SymTiles<f64>, lam: f64, mean: &[f32], scale: &[f32]) -> Self {
        Self { gram, lam, standardisation: checksum(mean, scale) }
    }

    /// Features, without the bias.
    pub fn d(&self) -> usize {
        self.gram.n().saturating_sub(1)
    }

    /// Ridge penalty.
    pub fn lam(&self) -> f64 {
        self.lam
    }

    /// Us'Us (d + 1, d + 1), dense: for inspection.
    pub fn gram(&self) -> ndarray::Array2<f64> {
        self.gram.to_dense()
    }

    /// P0 = (Us'Us + lambda D)^-1.
    pub(crate) fn p0(&self) -> Result<SymTiles<f64>> {
        let mut a = self.gram.clone();
        let bias = a.n() - 1;
        a.map_diagonal(|i, v| if i == bias { v } else { v + self.lam });
        linalg::inverse("P0 of the anchor", &a)
    }

    /// Refuses an anchor that is not that of `readout`.
    ///
    /// # Errors
    /// [`Error::Readout`] naming what does not match.
    pub fn check(&self, readout: &Readout) -> Result<()> {
        let parts = readout.parts();
        let refuse = |what: String| Err(Error::Readout(format!("the anchor does not belong to the readout: {what}")));
        if self.d() != readout.d() {
            return refuse(format!("it is for {} features, the readout takes {}", self.d(), readout.d()));
        }
        if self.lam != readout.lam() {
            return refuse(format!("its lam is {}, the readout's is {}", self.lam, readout.lam()));
        }
        if parts.clip.is_some() || checksum(&parts.mean, &parts.scale) != self.standardisation {
            return refuse("its rows were standardised in another way".into());
        }
        Ok(())
    }

    /// Where the anchor of the readout file `readout` lies: `x.anchor.safetensors` beside `x.safetensors`.
    pub fn path_for(readout: &Path) -> PathBuf {
        readout.with_extension("anchor.safetensors")
    }

    /// Writes the anchor, whole or not at all; the matrix as f32.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let n = self.gram.n();
        let dense: Vec<f32> = self.gram.to_dense().iter().map(|&v| v as f32).collect();
        let mut file = Writer::default();
        file.meta(VERSION_KEY, VERSION);
        file.meta("d", self.d());
        file.meta("lam", self.lam);
        file.meta("standardisation", &self.standardisation);
        file.f32("gram", &[n, n], &dense);
        file.write(path)
    }

    /// Reads an anchor; [`Self::check`] holds it against its readout.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] naming the file and what does not match.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = tensors::read(path)?;
        let file = Reader::parse(path, &bytes)?;
        file.check_version(VERSION_KEY, VERSION)?;
        let d: usize = file.value("d")?;
        let lam: f64 = file.value("lam")?;
        if d == 0 || d > 1 << 20 || !(lam.is_finite() && lam >= 0.0) {
            return Err(file.refuse(format!("d = {d}, lam = {lam} cannot be")));
        }
        let n = d + 1;
        let dense = file.f32("gram", &[n, n])?.into_iter().map(f64::from).collect();
        let dense = ndarray::Array2::from_shape_vec((n, n), dense).map_err(|e| file.refuse(e))?;
        Ok(Self { gram: SymTiles::from_dense(&dense.view()), lam, standardisation: file.value("standardisation")? })
    }
}
