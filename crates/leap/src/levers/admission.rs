//! Admission control: a waiting request is let in only if, with it, the engine is predicted not to run out of KV blocks
//! while those inside grow. How sure that has to be follows from what it costs to be wrong: the tokens that preempted
//! requests have computed again.
//!
//! For every tau of a grid, with S_i(tau) = P(L_i > a_i + tau | L_i > a_i) over the residents and the candidate and h_i
//! the blocks that only i holds once it is tau tokens further: sum S_i h_i + z sqrt(sum S_i (1 - S_i) h_i^2) must not
//! exceed the usable blocks.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::curve::Curve;
pub use super::curve::{AHEAD, KvGrowth, Request};
use super::lengths::FinishedLengths;
pub use super::lengths::KNOWN_LENGTHS;
use super::margin::Margin;
pub use super::margin::RECOMPUTE_SHARE;
use crate::remaining::SurvivalFunction;
use crate::{Error, Result};

/// What a look at a resident needs to know whether anything has changed, apart from all else: it is taken of everybody.
#[derive(Clone, Copy, Debug)]
struct Glance {
    id: u64,
    generated: u32,
    /// Tokens made from which on, and up to which, its curve holds; none where it has to be made anew.
    from: u32,
    until: u32,
    /// Which of the finished lengths it was made from; 0 where it goes by its own.
    version: u32,
}

#[derive(Clone, Debug)]
struct Resident {
    request: Request,
    curve: Curve,
    /// Place in the order of admissions.
    place: u64,
}

/// Who is inside, what they are predicted to hold, and how sure an admission has to be.
#[derive(Clone, Debug)]
pub struct Admission {
    growth: KvGrowth,
    usable_blocks: f64,
    index: FxHashMap<u64, u32>,
    glances: Vec<Glance>,
    residents: Vec<Resident>,
    /// Residents without a length of their own.
    unknown: usize,
    sum: Curve,
    finished: FinishedLengths,
    margin: Margin,
    admissions: u64,
    steps: u64,
    holds: u64,
    forecast: Option<Forecast>,
    predicted: f64,
    came: f64,
}

/// A predicted peak: so many blocks in the step `due`, of those who were admitted up to `place`.
#[derive(Clone, Copy, Debug)]
struct Forecast {
    blocks: f64,
    due: u64,
    place: u64,
}

impl Admission {
    /// For an engine with so many usable KV blocks, of whose computed tokens a `recompute_share` may be computed again
    /// because somebody was preempted.
    ///
    /// # Errors
    /// [`Error::Config`] where that share is none: 0, negative, above 1 or not a number.
    pub fn new(growth: KvGrowth, usable_blocks: u32, recompute_share: f64) -> Result<Self> {
        if !(recompute_share > 0.0 && recompute_share <= 1.0) {
            let text = format!("recompute_share: expected a number above 0 and at most 1, got {recompute_share}");
            return Err(Error::Config(text));
        }
        Ok(Self {
            margin: Margin::new(growth.tokens(usable_blocks), recompute_share),
            growth,
            usable_blocks: f64::from(usable_blocks),
            index: FxHashMap::default(),
            glances: Vec::new(),
            residents: Vec::new(),
            unknown: 0,
            sum: Curve::NONE,
            finished: FinishedLengths::default(),
            admissions: 0,
            steps: 0,
            holds: 0,
            forecast: None,
            predicted: 0.0,
            came: 0.0,
        })
    }

    /// A request has been admitted.
    pub fn admitted(&mut self, id: u64, request: Request) {
        self.left(id);
        self.admissions += 1;
        self.unknown += usize::from(request.length.is_none());
        self.index.insert(id, self.residents.len() as u32);
        self.glances.push(Glance { id, generated: 0, from: 0, until: 0, version: 0 });
        self.residents.push(Resident { request, curve: Curve::NONE, place: self.admissions });
    }

    /// A resident has lost its blocks for want of memory.
    pub fn preempted(&mut self, id: u64) {
        self.left(id);
        if let Some(forecast) = self.forecast.take() {
            // Whatever those inside would have come to hold, it is more than there is.
            self.predicted += forecast.blocks;
            self.came += self.usable_blocks;
        }
    }

    /// A resident has ended, or given its blocks to somebody better.
    pub fn left(&mut self, id: u64) {
        let Some(at) = self.index.remove(&id) else { return };
        let resident = self.residents.swap_remove(at as usize);
        self.glances.swap_remove(at as usize);
        if let Some(moved) = self.glances.get(at as usize) {
            self.index.insert(moved.id, at);
        }
        self.unknown -= usize::from(resident.request.length.is_none());
        self.sum.exchange(&resident.curve, &Curve::NONE);
    }

    /// More is known of a resident's length, or less.
    pub fn learned(&mut self, id: u64, length: Option<Arc<SurvivalFunction>>) {
        let Some(&at) = self.index.get(&id) else { return };
        self.glances[at as usize].until = 0;
        let before = &mut self.residents[at as usize].request.length;
        self.unknown += usize::from(length.is_none());
        self.unknown -= usize::from(before.is_none());
        *before = length;
    }

    /// A request has finished with so many tokens, by itself or at its limit: both say how long requests stay.
    pub fn finished(&mut self, tokens: u32) {
        self.finished.add(tokens);
    }

    /// A resident has generated so many tokens by now.
    pub fn progressed(&mut self, id: u64, generated: u32) {
        if let Some(&at) = self.index.get(&id) {
            self.look(at as usize, generated);
        }
    }

    /// Every resident has generated so many tokens by now.
    pub fn all_progressed(&mut self, generated: impl Fn(u64) -> u32) {
        for at in 0..self.glances.len() {
            self.look(at, generated(self.glances[at].id));
        }
    }

    fn look(&mut self, at: usize, generated: u32) {
        let glance = &mut self.glances[at];
        glance.generated = generated;
        let holds = (glance.from..glance.until).contains(&generated);
        if !(holds && (glance.version == 0 || glance.version == self.finished.version)) {
            self.make(at, generated);
        }
    }

    /// Makes a resident's curve anew.
    fn make(&mut self, at: usize, generated: u32) {
        let Resident { request, curve, .. } = &mut self.residents[at];
        let glance = &mut self.glances[at];
        let Some(length) = request.length.as_deref().or(self.finished.survival.as_ref()) else { return };
        let new = Curve::of(&self.growth, request, length, generated);
        let stride = self.growth.stride_of(request.prompt + generated);
        glance.from = stride.saturating_sub(request.prompt);
        glance.until = stride + self.growth.stride() - request.prompt;
        glance.version = if request.length.is_some() { 0 } else { self.finished.version };
        self.sum.exchange(curve, &new);
        *curve = new;
    }

    /// Whether a request that has generated so many tokens may come in. All residents have been brought up to date with
    /// [`progressed`](Self::progressed). Yes where nobody is inside, and where a length is not known yet.
    pub fn has_room(&mut self, candidate: &Request, generated: u32) -> bool {
        self.look_back();
        let pool = self.finished.survival.as_ref();
        if self.residents.is_empty() || (pool.is_none() && self.unknown > 0) {
            return true;
        }
        let Some(length) = candidate.length.as_deref().or(pool) else { return true };
        let curve = Curve::of(&self.growth, candidate, length, generated);
        self.sum.fits(&curve, self.margin.z(), self.usable_blocks)
    }

    /// The first of the queue was held back in a step.
    pub fn held(&mut self) {
        self.holds += 1;
    }

    /// So many equal steps have been composed, each of `computed` tokens; `recomputed` of those of the first had been
    /// computed before.
    pub fn stepped(&mut self, computed: u64, recomputed: u64, steps: u64) {
        self.steps += steps;
        self.margin.step(computed, recomputed, steps);
    }

    /// Steps in which the first of the queue was held back.
    pub fn holds(&self) -> u64 {
        self.holds
    }

    /// Standard deviations that have to be left free.
    pub fn z(&self) -> f64 {
        self.margin.z()
    }

    /// What residents came to hold over what had been predicted, at the tokens ahead at which that was most; none before
    /// the first such look back.
    pub fn peak_ratio(&self) -> Option<f64> {
        (self.predicted > 0.0).then(|| self.came / self.predicted)
    }

    /// Compares an earlier prediction with what those who were inside then hold now, and makes the next.
    fn look_back(&mut self) {
        if let Some(forecast) = self.forecast.take_if(|forecast| forecast.due <= self.steps) {
            // Nobody looked while the queue was empty: what is held now is something else.
            if self.steps - forecast.due < u64::from(AHEAD[0]) {
                let inside = self.residents.iter().zip(&self.glances).filter(|(one, _)| one.place <= forecast.place);
                let held = |(one, glance): (&Resident, &Glance)| {
                    one.request.held(&self.growth, one.request.prompt + glance.generated)
                };
                self.predicted += forecast.blocks;
                self.came += f64::from(inside.map(held).sum::<f32>());
            }
        }
        if self.forecast.is_none()
            && let (blocks, ahead) = self.sum.peak()
            && blocks > 0.0
        {
            let due = self.steps + u64::from(ahead);
            self.forecast = Some(Forecast { blocks, due, place: self.admissions });
        }
    }
}
