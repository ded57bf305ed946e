//! The whole state of an [`OnlineReadout`] in one file, from which another continues bit by bit as it would have.

use std::path::Path;

use super::{Facts, Label, OnlineOptions, OnlineReadout, Stage, Warmup, check};
use crate::readout::Readout;
use crate::rls::{Precision, Rls};
use crate::tensors::{self, Reader, Writer};
use crate::{Error, Result};

const VERSION_KEY: &str = "leap_online_version";
const VERSION: &str = "1";

fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::Readout(format!("the state cannot be written: {e}")))
}

impl OnlineReadout {
    /// Writes the whole state, labels that wait included, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut file = Writer::default();
        let labels = match &self.stage {
            Stage::Warming(w) => {
                file.meta("online_warmup_rows", w.rows);
                file.meta("online_warmup_limit", w.limit);
                file.f64("online_warmup_mean", &[self.facts.d], &w.mean);
                file.f64("online_warmup_squares", &[self.facts.d], &w.squares);
                &w.kept
            }
            Stage::Ready { rls, readout } => {
                // The readout's own reader takes every key that it does not know for extra metadata: here that would be
                // the state's keys, so what is extra travels apart.
                let mut parts = readout.parts().clone();
                file.meta("online_extra", json(&std::mem::take(&mut parts.meta.extra))?);
                Readout::new(parts)?.write_to(&mut file)?;
                rls.write_to(&mut file);
                &self.queue
            }
        };
        let rows: Vec<f64> = labels.iter().flat_map(|(row, _)| row.iter().copied()).collect();
        let marks: Vec<u32> = labels
            .iter()
            .flat_map(|(_, label)| match *label {
                Label::Exact(n) => [n, 0],
                Label::Censored(n) => [n, 1],
            })
            .collect();
        file.f64("online_rows", &[labels.len(), self.row_width()], &rows);
        file.u32("online_labels", &[labels.len(), 2], &marks);
        file.meta("online_waiting", labels.len());
        file.meta(VERSION_KEY, VERSION);
        file.meta("online", json(&self.facts)?);
        file.meta("online_noise", json(&self.noise)?);
        file.write(path)
    }

    /// Rows that wait are raw during the warm-up, standardised and with their 1 after it.
    fn row_width(&self) -> usize {
        self.facts.d + usize::from(!self.warming())
    }

    /// Refuses a state whose parts could not have come from one readout.
    fn check_loaded(&self) -> Result<()> {
        let f = &self.facts;
        let precision = if f.double { Precision::F64 } else { Precision::F32 };
        check(&OnlineOptions { batch: f.batch, forgetting: f.forgetting, precision })?;
        let fits = match &self.stage {
            Stage::Warming(w) => {
                Self::from_zero(f.d, f.max_tokens, f.lam, w.limit, f.kind, OnlineOptions::default())?;
                !f.known && w.rows < w.limit
            }
            Stage::Ready { rls, readout } => {
                (readout.d(), readout.max_tokens(), readout.lam()) == (f.d, f.max_tokens, f.lam)
                    && f.d.checked_add(1) == Some(rls.theta().len())
                    && rls.precision() == precision
            }
        };
        if fits && self.noise.max_tokens() == f.max_tokens {
            return Ok(());
        }
        Err(Error::Readout("readout, least squares, noise and state are not of one piece".into()))
    }

    /// Reads a state.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Readout`] naming the file and what does not match.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = tensors::read(path)?;
        let file = Reader::parse(path, &bytes)?;
        file.check_version(VERSION_KEY, VERSION)?;
        let facts: Facts = file.json("online")?;
        let d = facts.d;
        let stage = if file.text("online_warmup_rows").is_some() {
            Stage::Warming(Warmup {
                rows: file.value("online_warmup_rows")?,
                limit: file.value("online_warmup_limit")?,
                mean: file.f64("online_warmup_mean", &[d])?,
                squares: file.f64("online_warmup_squares", &[d])?,
                kept: Vec::new(),
            })
        } else {
            let mut parts = Readout::read_from(&file)?.parts().clone();
            parts.meta.extra = file.json("online_extra")?;
            Stage::Ready { rls: Rls::read_from(&file)?, readout: Readout::new(parts)? }
        };
        let mut out = Self { facts, stage, noise: file.json("online_noise")?, queue: Vec::new() };
        out.check_loaded().map_err(|e| file.refuse(e))?;
        let (waiting, width) = (file.value::<usize>("online_waiting")?, out.row_width());
        let rows = file.f64("online_rows", &[waiting, width])?;
        let marks = file.u32("online_labels", &[waiting, 2])?;
        if let Some(i) = marks.as_chunks::<2>().0.iter().position(|&[n, censored]| n == 0 || censored > 1) {
            return Err(file.refuse(format!("label {i} cannot be")));
        }
        let labels = marks.as_chunks::<2>().0.iter().map(|&[n, censored]| match censored {
            0 => Label::Exact(n),
            _ => Label::Censored(n),
        });
        let kept = rows.chunks_exact(width).map(<[f64]>::to_vec).zip(labels).collect();
        match &mut out.stage {
            Stage::Warming(w) => w.kept = kept,
            Stage::Ready { .. } => out.queue = kept,
        }
        Ok(out)
    }
}
