//! How far true lengths fall from predicted ones, by level of the prediction, learned online.

use serde::{Deserialize, Serialize};

/// Stand-in: one level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    count: f64,
    squares: f64,
}

impl Noise {
    /// A wide prior.
    pub fn new(max_tokens: u32) -> Self {
        Self { count: 4.0, squares: 4.0 * f64::from(max_tokens) / 16.0 }
    }

    /// One residual on the sqrt scale.
    pub fn observe(&mut self, _score: f64, residual: f64, leverage: f64) {
        self.count += 1.0;
        self.squares += residual * residual / (1.0 + leverage);
    }

    /// Standard deviation of y - m.
    pub fn sigma(&self, _score: f64) -> f64 {
        (self.squares / self.count).sqrt()
    }

    /// Residuals observed.
    pub fn count(&self) -> f64 {
        self.count - 4.0
    }
}
