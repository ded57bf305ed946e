//! How sure an admission has to be, which follows from what it costs to be wrong.

/// Share of the computed tokens that may be computed again, where nobody says otherwise.
pub const RECOMPUTE_SHARE: f64 = 0.01;
/// How fast z follows the waste, in standard deviations a KV cache of tokens computed again.
const GAIN: f64 = 5.0;
const Z_START: f64 = 1.0;
/// Wide enough that readouts fitted on shorter answers, a third too low, do not fill the cache. Beyond the upper bound
/// tokens computed again cost less than the memory that would lie idle.
const Z_BOUNDS: (f64, f64) = (-3.0, 5.0);

/// z, moved by its own waste: up with every token that is computed again, down with every one that is computed at all, so
/// that it rests where the first are the stated share of the second.
#[derive(Clone, Debug)]
pub(super) struct Margin {
    /// Share of the computed tokens that may be computed again.
    share: f64,
    /// z in whole tokens: computed again over that share, less computed. Exact, whatever steps are taken at once.
    level: i64,
    low: i64,
    high: i64,
    /// z of one of them.
    unit: f64,
}

impl Margin {
    pub(super) fn new(kv_tokens: f64, share: f64) -> Self {
        let unit = GAIN * share / kv_tokens.max(1.0);
        let tokens = |z: f64| (z / unit).round() as i64;
        Self { share, level: tokens(Z_START), low: tokens(Z_BOUNDS.0), high: tokens(Z_BOUNDS.1), unit }
    }

    pub(super) fn step(&mut self, computed: u64, recomputed: u64, steps: u64) {
        let wasted = (recomputed as f64 / self.share) as i64;
        self.level = (self.level + wasted - computed as i64).clamp(self.low, self.high);
        let more = computed.saturating_mul(steps.saturating_sub(1)).min(i64::MAX as u64 / 2);
        self.level = (self.level - more as i64).max(self.low);
    }

    pub(super) fn z(&self) -> f64 {
        self.level as f64 * self.unit
    }
}
