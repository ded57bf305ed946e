//! Aging: by how much a request has risen for having waited, on a clock that all requests share. All keys fall at one
//! rate at any moment, so that a key is fixed when a request arrives and no queue is ever sorted anew.

use super::FORGETTING;
use crate::Result;
use crate::queue::not_negative;
use serde::Serialize;

/// Seconds over which completions are averaged.
const MEMORY_S: f64 = 30.0;
/// Below this a wait is no queue that an order could act on, and the clock goes no faster.
const SHORTEST_WAIT_S: f64 = 1.0;
/// Where ln(remaining) stops telling lengths apart, as a part of the mean: those who are longer wait by age alone. Of 1 to
/// 16 with 1.5 to 4 e-foldings a wait the pair that holds both bounds of the grid, on the tail and on the mean.
const BOOST: f64 = 9.0;
/// e-foldings a standing wait where nobody says otherwise.
pub const AGING: f64 = 2.5;

/// How waiting raises a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Aging {
    /// e-foldings a second.
    #[serde(rename = "aging_rate")]
    PerSecond(f64),
    /// e-foldings a standing wait: what a newcomer would wait first come first served.
    #[serde(rename = "aging")]
    PerWait(f64),
}

impl Aging {
    /// Waiting raises nobody.
    pub const NONE: Self = Self::PerSecond(0.0);

    /// Whether waiting raises nobody.
    pub fn is_none(self) -> bool {
        matches!(self, Self::PerSecond(rate) | Self::PerWait(rate) if rate == 0.0)
    }
}

/// What the clock showed when a request arrived, and which lengths counted as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// V at the arrival, in e-foldings: what a key holds.
    pub aged: f64,
    /// Mean length of those that had finished by the last step, in tokens; infinite where none had.
    pub mean_tokens: f64,
}

/// The clock: V(t), in e-foldings.
///
/// For [`Aging::PerWait`] V(t) is the integral of alpha / W, with W = waiting / completions per second (an exponential mean
/// over 30 s), at least 1 s. It is told of both when a step is composed, and is linear in between. A request that has
/// waited as long as a newcomer would wait first come first served has risen by e^alpha.
#[derive(Clone, Debug)]
pub struct AgingClock {
    aging: Aging,
    /// V when the wait last changed, and when that was.
    value: f64,
    since_s: f64,
    /// e-foldings a second since then.
    rate: f64,
    waiting: u64,
    completions_per_s: f64,
    /// Finished since the last step; number and sum of the lengths among them.
    finished: u64,
    ended: u32,
    ended_tokens: u64,
    /// The decayed number and sum of the lengths since the start, up to the last step.
    lengths: f64,
    tokens: f64,
    /// Their mean when the last step was composed.
    mean_tokens: f64,
}

impl AgingClock {
    /// A clock that starts at 0.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) where the rate is negative or not finite.
    pub fn new(aging: Aging) -> Result<Self> {
        let rate = match aging {
            Aging::PerSecond(rate) => not_negative("aging_rate", rate)?,
            Aging::PerWait(alpha) => not_negative("aging", alpha)? / SHORTEST_WAIT_S,
        };
        Ok(Self {
            aging,
            value: 0.0,
            since_s: 0.0,
            rate,
            waiting: 0,
            completions_per_s: 0.0,
            finished: 0,
            ended: 0,
            ended_tokens: 0,
            lengths: 0.0,
            tokens: 0.0,
            mean_tokens: f64::INFINITY,
        })
    }

    /// V at `time_s`, which is not before the last step.
    pub fn at(&self, time_s: f64) -> f64 {
        match self.aging {
            Aging::PerSecond(rate) => rate * time_s,
            Aging::PerWait(_) => self.value + self.rate * (time_s - self.since_s).max(0.0),
        }
    }

    /// A request arrives at `time_s`, which is not before the last step.
    pub fn arrival(&self, time_s: f64) -> Arrival {
        Arrival { aged: self.at(time_s), mean_tokens: self.mean_tokens }
    }

    /// A request has ended with so many tokens; none where they say nothing of a length, since it was aborted.
    pub fn finished(&mut self, tokens: Option<u32>) {
        self.finished += 1;
        let Some(tokens) = tokens else { return };
        self.ended = self.ended.saturating_add(1);
        self.ended_tokens += u64::from(tokens.max(1));
    }

    /// A step has been composed at `now_s`, after which so many requests wait: for admission, or inside for a slot.
    pub fn step(&mut self, now_s: f64, waiting: u64) {
        let finished = std::mem::take(&mut self.finished);
        // As of a step, so that it does not matter whether an arrival is heard of before an end or after it. All ends
        // since the step before are equally old: an engine hears of them in whatever order it keeps its requests.
        let (ended, tokens) = (std::mem::take(&mut self.ended), std::mem::take(&mut self.ended_tokens));
        if ended > 0 {
            let left = FORGETTING.powi(i32::try_from(ended).unwrap_or(i32::MAX));
            self.lengths = left * self.lengths + f64::from(ended);
            self.tokens = left * self.tokens + tokens as f64;
            self.mean_tokens = self.tokens / self.lengths;
        }
        let Aging::PerWait(alpha) = self.aging else { return };
        if waiting == self.waiting && finished == 0 {
            return;
        }
        self.value = self.at(now_s);
        self.completions_per_s *= (-(now_s - self.since_s).max(0.0) / MEMORY_S).exp();
        self.completions_per_s += finished as f64 / MEMORY_S;
        self.since_s = self.since_s.max(now_s);
        self.waiting = waiting;
        // The mean of what has been seen so far, not of the emptiness before the first step.
        let seen = 1.0 - (-self.since_s / MEMORY_S).exp();
        let wait_s = match (waiting, self.completions_per_s) {
            (0, _) => 0.0,
            (_, 0.0) => self.since_s,
            (waiting, per_s) => waiting as f64 * seen / per_s,
        };
        self.rate = alpha / wait_s.max(SHORTEST_WAIT_S);
    }

    /// Remaining length as aging compares it: itself for the short, ever flatter from a share of the mean on.
    ///
    /// u / c (1 - exp(-c remaining / u)), with u the mean in the unit of `remaining`: the mean length, or its square where
    /// remaining is in tokens squared (`squared`). As `remaining` itself where aging goes by the second. The boost rule of
    /// Yu and Scully, "Strongly tail-optimal scheduling in the light-tailed M/G/1", SIGMETRICS 2024, on predicted
    /// lengths.
    pub fn boosted(&self, remaining: f64, arrival: Arrival, squared: bool) -> f64 {
        if matches!(self.aging, Aging::PerSecond(_)) || arrival.mean_tokens.is_infinite() {
            return remaining;
        }
        let unit = if squared { arrival.mean_tokens * arrival.mean_tokens } else { arrival.mean_tokens } / BOOST;
        -unit * (-remaining / unit).exp_m1()
    }
}
