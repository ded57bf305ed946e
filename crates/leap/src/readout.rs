//! A linear layer that reads an output length from features. Scoring is one dot product over `d` features: mean and
//! scale are folded into the weight when the readout is made, and rows are read in the format they come in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::noise::Noise;
use crate::rows::{Row, Rows};
use crate::{Error, Result};

mod file;

/// What the features are, and with it when they are known, from the earliest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Prompt features: on arrival.
    Prompt,
    /// Text features, a small encoder's of the prompt's text, beside the prompt features: once it has read the prompt.
    Text,
    /// The hidden state of the last prompt token, after prefill.
    State,
}

impl Kind {
    /// All of them, in the order in which they come to be known.
    pub const ALL: [Self; 3] = [Self::Prompt, Self::Text, Self::State];
}

/// The scale on which the layer is linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// Square root of tokens.
    Sqrt,
    /// Natural logarithm of tokens.
    Log,
    /// Tokens.
    Raw,
}

impl Target {
    /// `tokens` on this scale.
    pub fn of(self, tokens: f64) -> f64 {
        match self {
            Self::Sqrt => tokens.sqrt(),
            Self::Log => tokens.ln(),
            Self::Raw => tokens,
        }
    }

    /// Tokens of a `score` on this scale.
    pub fn length(self, score: f64) -> f64 {
        match self {
            Self::Sqrt => score * score,
            Self::Log => score.exp(),
            Self::Raw => score,
        }
    }
}

macro_rules! lower_case_names {
    ($type:ty, $what:literal, $($name:literal => $variant:path),+) => {
        impl std::str::FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($name => Ok($variant),)+
                    _ => Err(Error::Config(format!(concat!($what, " {:?}: expected one of", $(" ", $name),+), text))),
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $($variant => $name),+ })
            }
        }
    };
}

lower_case_names!(Kind, "kind", "prompt" => Kind::Prompt, "text" => Kind::Text, "state" => Kind::State);
lower_case_names!(Target, "target", "sqrt" => Target::Sqrt, "log" => Target::Log, "raw" => Target::Raw);

/// Where a readout comes from and what it belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// Which readout it is.
    pub kind: Kind,
    /// Model whose features it reads.
    pub model: Option<String>,
    /// Decoder layer whose output it reads.
    pub layer: Option<u32>,
    /// Day of the fit, as the caller writes it.
    pub fit_date: Option<String>,
    /// Rank correlation of out-of-fold predictions with true lengths.
    pub train_spearman: Option<f64>,
    /// Names of the data that it was fitted on.
    pub trained_on: Vec<String>,
    /// Anything else; kept in the file beside the fields above.
    pub extra: BTreeMap<String, String>,
}

impl Meta {
    /// Empty metadata of a readout of this kind.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            model: None,
            layer: None,
            fit_date: None,
            train_spearman: None,
            trained_on: Vec::new(),
            extra: BTreeMap::new(),
        }
    }
}

/// What a [`Readout`] is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// Mean of every feature (d).
    pub mean: Vec<f32>,
    /// Scale of every feature (d), above zero.
    pub scale: Vec<f32>,
    /// Weight of every standardised feature (d).
    pub weight: Vec<f32>,
    /// Bias, on the target's scale.
    pub bias: f32,
    /// Output budget M in tokens.
    pub max_tokens: u32,
    /// Scale on which the layer is linear.
    pub target: Target,
    /// Ridge penalty that it was fitted with.
    pub lam: f64,
    /// Standardised features are clipped to ± this; `None` where they are taken as they are.
    pub clip: Option<f32>,
    /// Provenance.
    pub meta: Meta,
    /// Noise of its predictions, where known.
    pub noise: Option<Noise>,
}

/// A linear layer over `d` features: `m = clip(bias + weight · (x - mean) / scale, target(1), target(M))`.
#[derive(Clone, Debug)]
pub struct Readout {
    parts: Parts,
    folded: Vec<f32>,
    folded_bias: f64,
}

impl PartialEq for Readout {
    fn eq(&self, other: &Self) -> bool {
        self.parts == other.parts
    }
}

impl Readout {
    /// Makes a readout and folds mean and scale into its weight.
    ///
    /// # Errors
    /// [`Error::Readout`] where lengths differ, a value is not finite, a scale is not above zero, `max_tokens` is 0, or the
    /// noise is for another one.
    pub fn new(parts: Parts) -> Result<Self> {
        let refuse = |what: String| Err(Error::Readout(what));
        let d = parts.weight.len();
        if d == 0 {
            return refuse("a readout needs at least one feature".into());
        }
        for (name, values) in [("mean", &parts.mean), ("scale", &parts.scale), ("weight", &parts.weight)] {
            if values.len() != d {
                return refuse(format!("{name} has {} values, weight has {d}", values.len()));
            }
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                return refuse(format!("{name}[{i}] is not finite"));
            }
        }
        if let Some(i) = parts.scale.iter().position(|&s| s <= 0.0) {
            return refuse(format!("scale[{i}] is {}, must be above 0", parts.scale[i]));
        }
        if !parts.bias.is_finite() {
            return refuse("bias is not finite".into());
        }
        if parts.max_tokens == 0 {
            return refuse("max_tokens must be at least 1".into());
        }
        if !(parts.lam.is_finite() && parts.lam >= 0.0) {
            return refuse(format!("lam is {}, must be finite and not negative", parts.lam));
        }
        if parts.clip.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
            return refuse("clip must be finite and above 0".into());
        }
        if let Some(noise) = parts.noise.as_ref().filter(|noise| noise.max_tokens() != parts.max_tokens) {
            let (found, wanted) = (noise.max_tokens(), parts.max_tokens);
            return refuse(format!("noise is for max_tokens {found}, the readout's is {wanted}"));
        }
        let folded: Vec<f32> =
            parts.weight.iter().zip(&parts.scale).map(|(&w, &s)| (f64::from(w) / f64::from(s)) as f32).collect();
        if let Some(i) = folded.iter().position(|v| !v.is_finite()) {
            return refuse(format!("weight[{i}] / scale[{i}] overflows"));
        }
        // The mean is taken off with the rounded weight: what rounding then leaves is in proportion to x - mean.
        let shift: f64 = folded.iter().zip(&parts.mean).map(|(&w, &m)| f64::from(w) * f64::from(m)).sum();
        let folded_bias = f64::from(parts.bias) - shift;
        Ok(Self { parts, folded, folded_bias })
    }

    /// What it is made of.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Number of features.
    pub fn d(&self) -> usize {
        self.parts.weight.len()
    }

    /// Output budget M in tokens: no prediction exceeds it.
    pub fn max_tokens(&self) -> u32 {
        self.parts.max_tokens
    }

    /// Scale on which the layer is linear.
    pub fn target(&self) -> Target {
        self.parts.target
    }

    /// Ridge penalty that it was fitted with.
    pub fn lam(&self) -> f64 {
        self.parts.lam
    }

    /// Provenance.
    pub fn meta(&self) -> &Meta {
        &self.parts.meta
    }

    /// Noise of its predictions, where it was measured.
    pub fn noise(&self) -> Option<&Noise> {
        self.parts.noise.as_ref()
    }

    /// Score of one row on the target's own scale, clipped to [target(1), target(M)].
    ///
    /// # Errors
    /// [`Error::Readout`] where the width is wrong, a feature is NaN or infinite, or the sum overflows.
    pub fn score_row(&self, row: Row) -> Result<f32> {
        self.score_at(row, 0)
    }

    /// m: square root of the predicted length of one row in tokens, whatever the target.
    ///
    /// # Errors
    /// As [`Self::score_row`].
    pub fn root_row(&self, row: Row) -> Result<f32> {
        let score = self.score_row(row)?;
        Ok(if self.parts.target == Target::Sqrt { score } else { self.length(score).sqrt() })
    }

    /// Where the `length` of one row lies in its predicted distribution ([`Noise::pit`]); None where the
    /// noise was not measured.
    ///
    /// # Errors
    /// As [`Self::score_row`].
    pub fn pit_row(&self, row: Row, length: f64) -> Result<Option<(f64, f64)>> {
        let m = f64::from(self.root_row(row)?);
        Ok(self.noise().map(|noise| noise.pit(m, length)))
    }

    /// Scores (n) of `rows` (n, d) on the target's own scale.
    ///
    /// # Errors
    /// As [`Self::score_row`], naming the first bad row and column.
    pub fn score(&self, rows: &Rows) -> Result<Vec<f32>> {
        rows.check_width(self.d())?;
        (0..rows.nrows()).map(|i| self.score_at(rows.row(i)?, i)).collect()
    }

    /// Predicted lengths (n) of `rows` (n, d) in tokens.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn predict(&self, rows: &Rows) -> Result<Vec<f32>> {
        let mut scores = self.score(rows)?;
        scores.iter_mut().for_each(|s| *s = self.length(*s));
        Ok(scores)
    }

    /// Tokens of a score on the target's own scale, within [1, M].
    pub fn length(&self, score: f32) -> f32 {
        let tokens = self.parts.target.length(f64::from(score));
        tokens.clamp(1.0, f64::from(self.parts.max_tokens)) as f32
    }

    fn score_at(&self, row: Row, index: usize) -> Result<f32> {
        row.check_width(index, self.d())?;
        let sum = match self.parts.clip {
            None => self.folded_bias + row.dot(&self.folded),
            Some(limit) => self.clipped(row, f64::from(limit)),
        };
        if !sum.is_finite() {
            return Err(match row.first_non_finite() {
                Some(column) => row.non_finite(index, column),
                None => {
                    Error::Readout(format!("row {index}: the features are finite but their weighted sum overflows"))
                }
            });
        }
        let m = f64::from(self.parts.max_tokens);
        Ok(sum.clamp(self.parts.target.of(1.0), self.parts.target.of(m)) as f32)
    }

    /// The sum with clipped features, which cannot be folded; NaN where a feature is not finite.
    fn clipped(&self, row: Row, limit: f64) -> f64 {
        let p = &self.parts;
        let x = row.to_f64_vec();
        let mut sum = f64::from(p.bias);
        for (((&x, &mean), &scale), &weight) in x.iter().zip(&p.mean).zip(&p.scale).zip(&p.weight) {
            let u = ((x - f64::from(mean)) / f64::from(scale)).clamp(-limit, limit);
            // x * 0 is NaN exactly where x is NaN or infinite, which the clip would hide.
            sum += u * f64::from(weight) + x * 0.0;
        }
        sum
    }
}
