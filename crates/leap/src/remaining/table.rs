//! What orders one request once its score is there, whatever the order: remaining tokens by tokens generated.

use std::sync::Arc;

use super::{GittinsTable, LengthDistribution, Objective, Order, SurvivalFunction, countdown, next_level, survival};
use crate::noise::Noise;

/// Remaining tokens of one request, made once when its score arrives; a look into it costs a few nanoseconds.
///
/// [`Order::Gittins`] holds its values at the shared levels, the other two are formulas and exact at any number of tokens.
#[derive(Clone, Debug)]
pub struct RemainingTable {
    score: f32,
    cap: u32,
    rule: Rule,
    length: Arc<SurvivalFunction>,
}

#[derive(Clone, Debug)]
enum Rule {
    Countdown,
    Survival { sigma: f64 },
    Gittins(GittinsTable),
}

impl RemainingTable {
    /// For a `score` (m, square-root scale) with the noise of its readout, of a request that stops at `cap` tokens.
    ///
    /// A cap above the readout's output budget M counts as M: the readout knows of no length beyond, and a limit that is
    /// but the rest of the context would stretch the noise over all of it.
    pub fn new(order: Order, objective: Objective, score: f32, noise: &Noise, cap: u32) -> Self {
        let (m, cap) = (f64::from(score), cap.min(noise.max_tokens()));
        let distribution = || noise.distribution(m, cap.max(1));
        Self::build(order, objective, score, cap, noise.sigma(m), distribution)
    }

    /// The same where sqrt(L) is normal about `score` with deviation `sigma`.
    pub fn normal(order: Order, objective: Objective, score: f32, sigma: f64, cap: u32) -> Self {
        let distribution = || LengthDistribution::normal(f64::from(score), sigma, cap.max(1));
        Self::build(order, objective, score, cap, sigma, distribution)
    }

    /// Of a request whose length is known for certain.
    pub fn of_length(order: Order, objective: Objective, length: u32) -> Self {
        let tokens = f64::from(length.max(1));
        Self::build(order, objective, tokens.sqrt() as f32, length, 0.0, || LengthDistribution::point(tokens))
    }

    fn build(
        order: Order,
        objective: Objective,
        score: f32,
        cap: u32,
        sigma: f64,
        distribution: impl FnOnce() -> LengthDistribution,
    ) -> Self {
        let cap = cap.max(1);
        let distribution = distribution();
        let rule = match order {
            Order::Countdown => Rule::Countdown,
            // As coarse as the replay keeps it, so that the two order alike.
            Order::Survival => Rule::Survival { sigma: f64::from(sigma as f32) },
            Order::Gittins => Rule::Gittins(GittinsTable::new(&distribution, cap, objective)),
        };
        Self { score, cap, rule, length: Arc::new(SurvivalFunction::new(&distribution)) }
    }

    /// Remaining tokens after `a`; under [`Order::Gittins`] 1 / index at the greatest level that is at most `a`. At least
    /// 1, always finite.
    pub fn remaining(&self, a: u32) -> f64 {
        match &self.rule {
            Rule::Gittins(table) => table.remaining(a),
            _ => self.expected(a),
        }
    }

    /// Expected remaining tokens after `a`, which the KV cache term of a key takes: at least 1, and no more than the cap
    /// leaves, since no memory is held for tokens that it forbids.
    pub fn mean_remaining(&self, a: u32) -> f64 {
        self.expected(a).min(f64::from(self.cap.saturating_sub(a).max(1)))
    }

    fn expected(&self, a: u32) -> f64 {
        let m = f64::from(self.score);
        match &self.rule {
            Rule::Countdown => countdown(m, f64::from(a)),
            Rule::Survival { sigma } => survival(m, *sigma, f64::from(a), f64::from(self.cap)),
            Rule::Gittins(table) => table.mean_remaining(a),
        }
    }

    /// P(L > t) of the request's length.
    pub fn length(&self) -> &Arc<SurvivalFunction> {
        &self.length
    }

    /// Tokens generated at which the request is to be given a new key; `u32::MAX` when it never is.
    pub fn next_rekey(&self, a: u32) -> u32 {
        if a >= self.cap { u32::MAX } else { next_level(a) }
    }

    /// m, on the square-root scale.
    pub fn score(&self) -> f32 {
        self.score
    }

    /// Tokens at which the request stops at the latest.
    pub fn cap(&self) -> u32 {
        self.cap
    }
}
