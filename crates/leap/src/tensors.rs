//! Safetensors files, read whole and written whole or not at all. The header is written here and not by the
//! `safetensors` crate, whose metadata map has no order: the same content must give the same bytes.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use half::f16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::{Error, Result};

/// Writes `path` through a temporary file in the same directory and a rename.
pub(crate) fn write_atomic(path: &Path, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().ok_or_else(|| Error::io(path, std::io::ErrorKind::InvalidFilename.into()))?;
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(".{}.{}.{unique}.tmp", name.to_string_lossy(), std::process::id()));
    let write = || {
        let mut file = std::io::BufWriter::with_capacity(1 << 20, fs::File::create_new(&temporary)?);
        fill(&mut file)?;
        file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        Error::io(path, source)
    })
}

struct Tensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

/// Metadata key of the checksum. Files that another program wrote may come without.
pub(crate) const CHECKSUM_KEY: &str = "leap_checksum";
/// How its value starts: a file whose key was damaged is told by it from one that never had a checksum.
const CHECKSUM_FORM: &str = "fnv1a64:";

/// Start of an [`fnv1a`] chain.
pub(crate) const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, 64 bits (Fowler, Noll, Vo). Every step is a bijection of the state, so one changed byte is always seen.
pub(crate) fn fnv1a(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(hash, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Checksum over the metadata (but its own entry) and the tensors, both in the order of their names.
fn checksum<'m>(
    metadata: impl Iterator<Item = (&'m String, &'m String)>,
    mut tensors: Vec<(&str, Dtype, &[usize], &[u8])>,
) -> String {
    let part = |hash, bytes: &[u8]| fnv1a(fnv1a(hash, (bytes.len() as u64).to_le_bytes()), bytes.iter().copied());
    let metadata: BTreeMap<_, _> = metadata.filter(|(key, _)| *key != CHECKSUM_KEY).collect();
    let mut hash =
        metadata.iter().fold(FNV_BASIS, |hash, (key, value)| part(part(hash, key.as_bytes()), value.as_bytes()));
    tensors.sort_unstable_by_key(|t| t.0);
    for (name, dtype, shape, data) in tensors {
        let kind = format!("{dtype:?} {shape:?}");
        hash = part(part(part(hash, name.as_bytes()), kind.as_bytes()), data);
    }
    format!("{CHECKSUM_FORM}{hash:016x}")
}

/// Collects tensors and metadata, then writes them.
#[derive(Default)]
pub(crate) struct Writer<'a> {
    pub metadata: BTreeMap<String, String>,
    tensors: Vec<Tensor<'a>>,
}

macro_rules! push {
    ($name:ident, $type:ty, $dtype:ident) => {
        pub fn $name(&mut self, name: &str, shape: &[usize], data: &[$type]) {
            let bytes = data.iter().flat_map(|v| v.to_le_bytes()).collect();
            self.tensors.push(Tensor {
                name: name.into(),
                dtype: Dtype::$dtype,
                shape: shape.to_vec(),
                bytes: Cow::Owned(bytes),
            });
        }
    };
}

impl<'a> Writer<'a> {
    push!(f32, f32, F32);
    push!(f64, f64, F64);
    push!(u32, u32, U32);

    pub fn bytes(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &'a [u8]) {
        self.tensors.push(Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes: Cow::Borrowed(bytes) });
    }

    pub fn meta(&mut self, key: &str, value: impl ToString) {
        self.metadata.insert(key.into(), value.to_string());
    }

    pub fn write(mut self, path: &Path) -> Result<()> {
        // Widest first, so that every tensor is aligned for whoever maps the file.
        self.tensors.sort_by(|a, b| (Reverse(a.dtype), &a.name).cmp(&(Reverse(b.dtype), &b.name)));
        let tensors = self.tensors.iter().map(|t| (t.name.as_str(), t.dtype, &t.shape[..], &*t.bytes)).collect();
        let sum = checksum(self.metadata.iter(), tensors);
        self.meta(CHECKSUM_KEY, sum);
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), json!(self.metadata));
        let mut offset = 0;
        for t in &self.tensors {
            let end = offset + t.bytes.len();
            let dtype = serde_json::to_value(t.dtype).unwrap_or(Value::Null);
            let entry = json!({ "dtype": dtype, "shape": t.shape, "data_offsets": [offset, end] });
            header.insert(t.name.clone(), entry);
            offset = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        write_atomic(path, |file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            self.tensors.iter().try_for_each(|t| file.write_all(&t.bytes))
        })
    }
}

/// The bytes of a file on disk.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|source| Error::io(path, source))
}

/// A parsed file. Every fault is an [`Error::Readout`] that names the file and what does not match.
pub(crate) struct Reader<'a> {
    path: PathBuf,
    metadata: HashMap<String, String>,
    tensors: SafeTensors<'a>,
}

impl<'a> Reader<'a> {
    pub fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self> {
        let refuse = |e: safetensors::SafeTensorError| {
            Error::Readout(format!("{}: not a whole safetensors file: {e}", path.display()))
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(refuse)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = SafeTensors::deserialize(bytes).map_err(refuse)?;
        Ok(Self { path: path.into(), metadata, tensors })
    }

    pub fn refuse(&self, what: impl std::fmt::Display) -> Error {
        Error::Readout(format!("{}: {what}", self.path.display()))
    }

    /// Refuses a file that is not as it was written, as far as it says so.
    fn check_sum(&self) -> Result<()> {
        let damaged = || Err(self.refuse("the checksum does not match: the file was damaged or changed by hand"));
        let Some(stored) = self.text(CHECKSUM_KEY) else {
            let lost = self.metadata.values().any(|value| value.starts_with(CHECKSUM_FORM));
            return if lost { damaged() } else { Ok(()) };
        };
        let tensors: Vec<_> = self.tensors.iter().collect();
        let tensors = tensors.iter().map(|(name, t)| (*name, t.dtype(), t.shape(), t.data())).collect();
        if checksum(self.metadata.iter(), tensors) == stored { Ok(()) } else { damaged() }
    }

    /// Refuses a file without `key` = `version`, and one whose checksum does not match.
    pub fn check_version(&self, key: &str, version: &str) -> Result<()> {
        match self.metadata.get(key) {
            Some(found) if found == version => self.check_sum(),
            Some(found) => Err(self.refuse(format!("{key} is {found:?}, this version reads {version:?}"))),
            None => Err(self.refuse(format!("no {key} in the metadata: not a file of this kind"))),
        }
    }

    /// All metadata but the checksum.
    pub fn metadata(&self) -> impl Iterator<Item = (&String, &String)> {
        self.metadata.iter().filter(|(key, _)| *key != CHECKSUM_KEY)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// A metadata value that must be there, parsed.
    pub fn value<T: std::str::FromStr>(&self, key: &str) -> Result<T> {
        let text = self.text(key).ok_or_else(|| self.refuse(format!("no {key} in the metadata")))?;
        text.parse().map_err(|_| self.refuse(format!("{key} = {text:?} in the metadata cannot be read")))
    }

    /// A metadata value that must be there, as JSON.
    pub fn json<T: serde::de::DeserializeOwned>(&self, key: &str) -> Result<T> {
        let text = self.text(key).ok_or_else(|| self.refuse(format!("no {key} in the metadata")))?;
        serde_json::from_str(text).map_err(|e| self.refuse(format!("{key} in the metadata: {e}")))
    }

    pub fn tensor(&self, name: &str) -> Result<TensorView<'a>> {
        self.tensors.tensor(name).map_err(|_| self.refuse(format!("no tensor {name:?}")))
    }

    /// Tensor `name`, which must have this type and shape.
    pub fn exact(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8]> {
        let tensor = self.tensor(name)?;
        if tensor.dtype() != dtype || tensor.shape() != shape {
            let (t, s) = (tensor.dtype(), tensor.shape());
            return Err(self.refuse(format!("tensor {name:?} is {t:?} {s:?}, expected {dtype:?} {shape:?}")));
        }
        Ok(tensor.data())
    }

    /// Finite f32 values of tensor `name`.
    pub fn f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let bytes = self.exact(name, Dtype::F32, shape)?;
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        self.finite(name, values, |v| v.is_finite())
    }

    /// Finite f64 values of tensor `name`.
    pub fn f64(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        let bytes = self.exact(name, Dtype::F64, shape)?;
        let values: Vec<f64> = bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect();
        self.finite(name, values, |v| v.is_finite())
    }

    /// The u32 values of tensor `name`.
    pub fn u32(&self, name: &str, shape: &[usize]) -> Result<Vec<u32>> {
        let bytes = self.exact(name, Dtype::U32, shape)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect())
    }

    fn finite<T>(&self, name: &str, values: Vec<T>, ok: impl Fn(&T) -> bool) -> Result<Vec<T>> {
        match values.iter().position(|v| !ok(v)) {
            Some(i) => Err(self.refuse(format!("tensor {name:?}: value {i} is not finite"))),
            None => Ok(values),
        }
    }
}

/// Half precision values from little-endian bytes.
pub(crate) fn f16_values(bytes: &[u8]) -> impl Iterator<Item = f16> + '_ {
    bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b))
}
