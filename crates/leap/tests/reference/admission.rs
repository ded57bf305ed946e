//! Whether the next in line may come in, by the memory to come; and the clock by which those who wait rise. Both are
//! worked out anew from all that has happened, in floating point.

use leap::levers::admission::KNOWN_LENGTHS;
use leap::levers::aging::Aging;
use leap::replay::Rule;

use super::Reference;

const AHEAD: [f64; 20] = [
    8.0, 16.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0, 2048.0, 3072.0,
    4096.0, 6144.0, 8192.0, 16384.0,
];

/// What admission goes by.
pub struct Room {
    z: f64,
    /// Lengths that have finished, in order, and those that the last look at them took in.
    lengths: Vec<f64>,
    looked_at: usize,
    /// Whether a decision hung on less than rounding may change.
    pub close: bool,
    pub holds: u64,
}

impl Default for Room {
    fn default() -> Self {
        Self { z: 1.0, lengths: Vec::new(), looked_at: 0, close: false, holds: 0 }
    }
}

impl Room {
    pub fn finished(&mut self, tokens: u32) {
        self.lengths.push(f64::from(tokens));
        let seen = self.lengths.len();
        if seen >= KNOWN_LENGTHS as usize && seen - self.looked_at >= (seen / 16).clamp(1, 64) {
            self.looked_at = seen;
        }
    }

    /// Upper edges of the bins of an eighth of an octave that lengths fell into, with their share.
    fn bins(&self) -> Vec<(f64, f64)> {
        let mut bins: Vec<(f64, f64)> = Vec::new();
        for (age, &length) in self.lengths[..self.looked_at].iter().rev().enumerate() {
            let edge = ((length.log2() * 8.0).ceil() / 8.0).exp2();
            let weight = 0.9995_f64.powi(age as i32);
            match bins.iter_mut().find(|bin| bin.0 == edge) {
                Some(bin) => bin.1 += weight,
                None => bins.push((edge, weight)),
            }
        }
        bins.sort_by(|x, y| x.0.total_cmp(&y.0));
        let total: f64 = bins.iter().map(|bin| bin.1).sum();
        bins.into_iter().map(|(edge, weight)| (edge, weight / total)).collect()
    }

    /// Share of the finished lengths above `t`: a bin but the first and the last is spread down to the one before it.
    fn above(&self, t: f64) -> f64 {
        let bins = self.bins();
        let share = |i: usize| {
            let (edge, weight) = bins[i];
            let from = if i == 0 || i + 1 == bins.len() { edge } else { bins[i - 1].0 };
            if t >= edge {
                0.0
            } else if t <= from {
                weight
            } else {
                weight * (edge - t) / (edge - from)
            }
        };
        (0..bins.len()).map(share).sum()
    }
}

impl Reference<'_> {
    /// Stored tokens, as the middle of the block that the next one falls into.
    fn stored(&self, id: usize) -> f64 {
        let request = &self.requests[id];
        let size = self.config.block_size;
        f64::from((request.prompt + request.generated) / size * size + size / 2)
    }

    /// P(length > a + tau | length > a).
    fn survives(&self, id: usize, tau: f64) -> f64 {
        let request = &self.requests[id];
        let begun = (request.prompt + request.generated) / self.config.block_size * self.config.block_size;
        let a = f64::from(begun.saturating_sub(request.prompt));
        if a + tau >= self.max_tokens {
            return 0.0;
        }
        if matches!(self.spec.rule, Rule::SjfOracle | Rule::SrptOracle) {
            return if f64::from(request.output) > a + tau { 1.0 } else { 0.0 };
        }
        let now = self.room.above(a);
        if now > 0.0 { self.room.above(a + tau) / now } else { 0.0 }
    }

    fn known(&self) -> bool {
        matches!(self.spec.rule, Rule::SjfOracle | Rule::SrptOracle) || self.room.looked_at > 0
    }

    /// Whether the next in line, of whose blocks others hold `shared`, may come in.
    pub fn has_room(&mut self, id: usize, shared: usize) -> bool {
        if !self.spec.levers.admission || self.residents.is_empty() || !self.known() {
            return true;
        }
        let size = f64::from(self.config.block_size);
        let usable = f64::from(self.config.kv_tokens / self.config.block_size);
        let all: Vec<(usize, usize)> =
            self.residents.iter().map(|&other| (other, self.requests[other].shared)).chain([(id, shared)]).collect();
        let mut fits = true;
        for tau in AHEAD {
            let (mut mean, mut variance) = (0.0, 0.0);
            for &(other, shared) in &all {
                let held = ((self.stored(other) + tau) / size + 0.5 - shared as f64).max(0.0);
                let survives = self.survives(other, tau);
                mean += survives * held;
                variance += survives * (1.0 - survives) * held * held;
            }
            let needed = mean + self.room.z * variance.sqrt();
            self.room.close |= variance > 0.0 && (needed - usable).abs() < 0.002;
            fits &= needed <= usable;
        }
        self.room.holds += u64::from(!fits);
        fits
    }

    /// A step of so many tokens, some of which had been computed before.
    pub fn waste(&mut self, computed: u32, recomputed: u32) {
        let tokens = f64::from(self.config.kv_tokens / self.config.block_size * self.config.block_size);
        let wasted = f64::from(recomputed) - 0.01 * f64::from(computed);
        self.room.z = (self.room.z + 5.0 * wasted / tokens).clamp(-3.0, 5.0);
    }
}

/// e-foldings by which waiting has raised everybody.
#[derive(Default)]
pub struct Clock {
    value: f64,
    now: f64,
    rate: f64,
    waiting: usize,
    finished: usize,
    per_s: f64,
    changed: f64,
    /// Decayed number and sum of the lengths that have finished, and their mean when the last step was composed.
    lengths: (f64, f64),
    /// Lengths that have finished since.
    ended: Vec<u32>,
    pub mean: Option<f64>,
}

impl Clock {
    pub fn at(&self, aging: Aging, time: f64) -> f64 {
        match aging {
            Aging::PerSecond(rate) => rate * time,
            Aging::PerWait(alpha) => {
                let rate = if self.rate > 0.0 { self.rate } else { alpha };
                self.value + rate * (time - self.now).max(0.0)
            }
        }
    }

    pub fn finished(&mut self, tokens: u32) {
        self.finished += 1;
        self.ended.push(tokens);
    }

    pub fn step(&mut self, aging: Aging, now: f64, waiting: usize) {
        let decay = 0.9995_f64.powf(self.ended.len() as f64);
        self.lengths.0 = decay * self.lengths.0 + self.ended.len() as f64;
        self.lengths.1 = decay * self.lengths.1 + self.ended.drain(..).map(f64::from).sum::<f64>();
        self.mean = (self.lengths.0 > 0.0).then(|| self.lengths.1 / self.lengths.0);
        let Aging::PerWait(alpha) = aging else { return };
        self.value = self.at(aging, now);
        self.now = now;
        let finished = std::mem::take(&mut self.finished);
        if finished == 0 && waiting == self.waiting {
            return;
        }
        self.per_s = self.per_s * (-(now - self.changed) / 30.0).exp() + finished as f64 / 30.0;
        self.changed = now;
        self.waiting = waiting;
        let per_s = self.per_s / (1.0 - (-now / 30.0).exp());
        let wait = if waiting == 0 {
            0.0
        } else if self.per_s == 0.0 {
            now
        } else {
            waiting as f64 / per_s
        };
        self.rate = alpha / wait.max(1.0);
    }
}
