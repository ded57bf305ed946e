//! The readout file: tensors `mean`, `scale`, `weight` (d) and `bias` (1) in f32; everything else as metadata strings.

use std::path::Path;

use super::{Meta, Parts, Readout};
use crate::tensors::{self, Reader, Writer};
use crate::{Error, Result};

const VERSION_KEY: &str = "leap_readout_version";
const VERSION: &str = "1";
/// Metadata keys with a meaning of their own; any other key is `Meta::extra`.
const KEYS: [&str; 13] = [
    VERSION_KEY,
    "kind",
    "model",
    "layer",
    "d",
    "max_tokens",
    "target",
    "lam",
    "clip",
    "fit_date",
    "train_spearman",
    "trained_on",
    "noise",
];

impl Readout {
    /// Writes the readout as a safetensors file, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] where a key of `meta().extra` has a meaning of its own.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut file = Writer::default();
        self.write_to(&mut file)?;
        file.write(path)
    }

    pub(crate) fn write_to(&self, file: &mut Writer) -> Result<()> {
        let p = self.parts();
        let shape = [self.d()];
        file.f32("mean", &shape, &p.mean);
        file.f32("scale", &shape, &p.scale);
        file.f32("weight", &shape, &p.weight);
        file.f32("bias", &[1], &[p.bias]);
        for (key, value) in &p.meta.extra {
            if KEYS.contains(&key.as_str()) || key == tensors::CHECKSUM_KEY {
                return Err(Error::Readout(format!("extra metadata must not use the key {key:?}")));
            }
            file.meta(key, value);
        }
        file.meta(VERSION_KEY, VERSION);
        file.meta("kind", p.meta.kind);
        file.meta("d", self.d());
        file.meta("max_tokens", p.max_tokens);
        file.meta("target", p.target);
        file.meta("lam", p.lam);
        if let Some(clip) = p.clip {
            file.meta("clip", clip);
        }
        if let Some(model) = &p.meta.model {
            file.meta("model", model);
        }
        if let Some(layer) = p.meta.layer {
            file.meta("layer", layer);
        }
        if let Some(date) = &p.meta.fit_date {
            file.meta("fit_date", date);
        }
        if let Some(spearman) = p.meta.train_spearman {
            file.meta("train_spearman", spearman);
        }
        file.meta("trained_on", json(&p.meta.trained_on)?);
        if let Some(noise) = &p.noise {
            file.meta("noise", json(noise)?);
        }
        Ok(())
    }

    /// Reads a readout file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] naming the file and what does not match: version, tensors, shapes, types,
    /// values.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = tensors::read(path)?;
        Self::read_from(&Reader::parse(path, &bytes)?)
    }

    pub(crate) fn read_from(file: &Reader) -> Result<Self> {
        file.check_version(VERSION_KEY, VERSION)?;
        let d: usize = file.value("d")?;
        let optional = |key| file.text(key).map(str::to_owned);
        let meta = Meta {
            kind: file.value("kind")?,
            model: optional("model"),
            layer: file.text("layer").map(|_| file.value("layer")).transpose()?,
            fit_date: optional("fit_date"),
            train_spearman: file.text("train_spearman").map(|_| file.value("train_spearman")).transpose()?,
            trained_on: file.json("trained_on")?,
            extra: file
                .metadata()
                .filter(|(key, _)| !KEYS.contains(&key.as_str()))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
        };
        let parts = Parts {
            mean: file.f32("mean", &[d])?,
            scale: file.f32("scale", &[d])?,
            weight: file.f32("weight", &[d])?,
            bias: file.f32("bias", &[1])?[0],
            max_tokens: file.value("max_tokens")?,
            target: file.value("target")?,
            lam: file.value("lam")?,
            clip: file.text("clip").map(|_| file.value("clip")).transpose()?,
            meta,
            noise: file.text("noise").map(|_| file.json("noise")).transpose()?,
        };
        Self::new(parts).map_err(|e| file.refuse(e))
    }
}

fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::Readout(format!("metadata cannot be written: {e}")))
}
