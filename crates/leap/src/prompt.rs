//! Prompt features, known before prefill: the mean of the model's own input embeddings over the prompt, through a
//! fixed random projection, and the prompt's length. A random projection with entries of one size keeps distances
//! (Achlioptas 2003, Database-friendly random projections); projecting the embedding table once, when it is loaded,
//! leaves a sum over short rows for each prompt.

use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::Mmap;
use safetensors::Dtype;

use crate::kernels::add_halves;
use crate::rows::{Row, Rows};
use crate::tensors::{Reader, Writer, f16_values};
use crate::{Error, Result};

mod projection;

use projection::Projection;

const VERSION_KEY: &str = "leap_prompt_version";
const VERSION: &str = "1";
/// Features of the length that follow the projected ones.
pub const LENGTH_FEATURES: usize = 3;

/// sqrt(n), ln(1 + n) and n for a prompt of n tokens: features of their own (d = 3) where nothing else is known.
pub fn length_features(n: u32) -> [f32; LENGTH_FEATURES] {
    let n = f64::from(n);
    [n.sqrt() as f32, n.ln_1p() as f32, n as f32]
}

#[derive(Debug)]
enum Table {
    Owned(Vec<f16>),
    /// A mapped file and where in it the table starts.
    Mapped(Mmap, usize),
}

/// An embedding table (vocabulary, dim) after projection, in f16, and the projection that it went through.
#[derive(Debug)]
pub struct PromptFeatures {
    projection: Projection,
    vocabulary: usize,
    table: Table,
}

impl PromptFeatures {
    /// Projects an embedding table (vocabulary, d) to `dim` dimensions.
    ///
    /// # Errors
    /// [`Error::Readout`] where the table is empty or holds a NaN or an infinity, [`Error::Config`] where `dim` is 0.
    pub fn new(embedding: &Rows, dim: usize, seed: u64) -> Result<Self> {
        let projection = Projection::new(embedding.ncols(), dim, seed)?;
        let vocabulary = embedding.nrows();
        let table = projection.table(vocabulary, |i, out| {
            let row = embedding.row(i)?;
            row.check(i, out.len())?;
            out.copy_from_slice(&row.to_f32_vec());
            Ok(())
        })?;
        Ok(Self { projection, vocabulary, table: Table::Owned(table) })
    }

    /// Projects the embedding table `tensor` (vocabulary, d; F32, F16 or BF16) of a safetensors file, which is mapped
    /// and not read whole.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Readout`] naming the file and what does not match; otherwise as [`Self::new`].
    pub fn from_safetensors(path: &Path, tensor: &str, dim: usize, seed: u64) -> Result<Self> {
        let map = map(path)?;
        let file = Reader::parse(path, &map)?;
        let view = file.tensor(tensor)?;
        let &[vocabulary, d] = view.shape() else {
            return Err(file.refuse(format!("tensor {tensor:?} has shape {:?}, expected two dimensions", view.shape())));
        };
        let convert: fn(&[u8], &mut [f32]) = match view.dtype() {
            Dtype::F32 => |b, out| out.iter_mut().zip(b.as_chunks().0).for_each(|(o, &b)| *o = f32::from_le_bytes(b)),
            Dtype::F16 => |b, out| out.iter_mut().zip(f16_values(b)).for_each(|(o, v)| *o = v.to_f32()),
            Dtype::BF16 => |b, out| {
                let widen = |&[low, high]: &[u8; 2]| f32::from_le_bytes([0, 0, low, high]);
                out.iter_mut().zip(b.as_chunks().0).for_each(|(o, b)| *o = widen(b));
            },
            other => return Err(file.refuse(format!("tensor {tensor:?} is {other:?}, expected F32, F16 or BF16"))),
        };
        let projection = Projection::new(d, dim, seed)?;
        let bytes = view.data();
        let width = bytes.len() / vocabulary.max(1);
        let table = projection.table(vocabulary, |i, out| {
            convert(&bytes[i * width..(i + 1) * width], out);
            Row::F32(out).check(i, d).map_err(|e| file.refuse(e))
        })?;
        Ok(Self { projection, vocabulary, table: Table::Owned(table) })
    }

    /// Features of the projected embedding.
    pub fn dim(&self) -> usize {
        self.projection.dim
    }

    /// All features: `dim` and those of the length.
    pub fn width(&self) -> usize {
        self.dim() + LENGTH_FEATURES
    }

    /// Token ids below this are known.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Width d of the embedding before projection.
    pub fn d(&self) -> usize {
        self.projection.d
    }

    /// Seed of the projection.
    pub fn seed(&self) -> u64 {
        self.projection.seed
    }

    /// Features (dim + 3) of a prompt: the mean of its tokens' projected embeddings, then sqrt(n), ln(1 + n), n.
    ///
    /// # Errors
    /// [`Error::Readout`] where the prompt is empty or an id is past the vocabulary.
    pub fn pool(&self, token_ids: &[u32]) -> Result<Vec<f32>> {
        let n = count(token_ids.len())?;
        let dim = self.dim();
        if let Some(position) = token_ids.iter().position(|&id| id as usize >= self.vocabulary) {
            let (id, known) = (token_ids[position], self.vocabulary);
            return Err(Error::Readout(format!("token {position}: id {id} is past the vocabulary of {known}")));
        }
        let mut sums = vec![0f64; dim];
        let rows = token_ids.iter().map(|&id| id as usize * dim..(id as usize + 1) * dim);
        match &self.table {
            Table::Owned(table) => {
                let table: &[u16] = table.reinterpret_cast();
                add_halves(rows.map(|row| &table[row]), &mut sums);
            }
            Table::Mapped(map, start) => {
                let table = map[*start..].as_chunks::<2>().0;
                add_halves(rows.map(|row| &table[row]), &mut sums);
            }
        }
        Ok(with_length(&sums, 1.0 / f64::from(n), n))
    }

    /// The same features from the mean (d) of a prompt's embeddings, where that is what was stored. Projection is
    /// linear, so this equals [`Self::pool`] up to the table's rounding to f16.
    ///
    /// # Errors
    /// [`Error::Readout`] where the width is wrong, a value is not finite, or `tokens` is 0.
    pub fn project(&self, mean: Row, tokens: u32) -> Result<Vec<f32>> {
        let n = count(tokens as usize)?;
        mean.check(0, self.d())?;
        Ok(with_length(&self.projection.apply(&mean.to_f64_vec()), 1.0, n))
    }

    /// Writes the projected table and what it came from.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let owned: Vec<u8>;
        let bytes = match &self.table {
            Table::Owned(table) => {
                owned = table.iter().flat_map(|v| v.to_le_bytes()).collect();
                &owned[..]
            }
            Table::Mapped(map, start) => &map[*start..*start + self.vocabulary * self.dim() * 2],
        };
        let mut file = Writer::default();
        file.meta(VERSION_KEY, VERSION);
        file.meta("d", self.d());
        file.meta("dim", self.dim());
        file.meta("seed", self.seed());
        file.meta("vocabulary", self.vocabulary);
        file.bytes("table", Dtype::F16, &[self.vocabulary, self.dim()], bytes);
        file.write(path)
    }

    /// Maps a file that [`Self::save`] wrote; nothing is projected again.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] naming the file and what does not match.
    pub fn load(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let file = Reader::parse(path, &map)?;
        file.check_version(VERSION_KEY, VERSION)?;
        let (vocabulary, dim): (usize, usize) = (file.value("vocabulary")?, file.value("dim")?);
        let bytes = file.exact("table", Dtype::F16, &[vocabulary, dim])?;
        let projection = Projection::new(file.value("d")?, dim, file.value("seed")?).map_err(|e| file.refuse(e))?;
        if let Some(i) = f16_values(bytes).position(|v| !v.is_finite()) {
            return Err(file.refuse(format!("the row of token {} is not finite", i / dim)));
        }
        let start = bytes.as_ptr().addr() - map.as_ptr().addr();
        Ok(Self { projection, vocabulary, table: Table::Mapped(map, start) })
    }
}

fn count(tokens: usize) -> Result<u32> {
    match u32::try_from(tokens) {
        Ok(0) => Err(Error::Readout("the prompt is empty".into())),
        Ok(n) => Ok(n),
        Err(_) => Err(Error::Readout(format!("a prompt of {tokens} tokens is too long"))),
    }
}

fn with_length(values: &[f64], factor: f64, n: u32) -> Vec<f32> {
    values.iter().map(|v| (v * factor) as f32).chain(length_features(n)).collect()
}

fn map(path: &Path) -> Result<Mmap> {
    let file = std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
    // SAFETY: the mapping is read-only and private. Writers here replace files by rename, so the mapped one stays as
    // it is; a foreign program that shrinks it in place ends the process, as with any mapped model file.
    unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))
}
