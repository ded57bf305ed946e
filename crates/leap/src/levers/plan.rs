//! The slots lever as a whole, for an engine that shows all its residents before every step and says afterwards who got
//! a token: who decodes, who is passed over, and in which order they stand.

use rustc_hash::{FxHashMap, FxHashSet};

use super::adapters::{self, Adapted};
use super::running::{Look, Part, Resident, Running, order};
use super::slots::{Contender, Slots};
use crate::queue::key_of_ln;

/// What the next step could have for a resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nothing.
    Idle,
    /// One token.
    Decoding,
    /// A chunk of its prompt, anew where it was preempted.
    Prefilling,
}

/// A resident as the engine knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Active {
    /// Place in the order of arrival.
    pub number: u64,
    /// What the next step could have for it.
    pub class: Class,
    /// Its adapter, if it has one and adapters are limited.
    pub adapter: Option<u64>,
    /// Logarithm of its remaining tokens; read only where [`Planner::wants_keys`].
    pub ln_remaining: f64,
    /// What the aging clock showed when it arrived, in e-foldings; read with `ln_remaining`.
    pub aged: f64,
}

/// What holds for every step of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Residents that decode in a step.
    pub slots: usize,
    /// Tokens of a step.
    pub step_tokens: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// KV cache groups, each with blocks of its own.
    pub groups: usize,
    /// Adapters of a step.
    pub max_adapters: Option<usize>,
    /// A resident takes a slot from one that has it only if it is so many times shorter.
    pub hysteresis: f64,
    /// A resident that has not decoded for so many steps gets the next slot.
    pub wait_cap_steps: Option<u32>,
}

/// One step's arrangement: indices of the residents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// All of them, in the order in which the engine is to look at them.
    pub order: Vec<u32>,
    /// Those to be passed over.
    pub gated: Vec<u32>,
    /// Those whose steps without a slot are counted: who could decode, and who prefills but is passed over.
    pub contenders: Vec<u32>,
    /// How many decode only because of the wait cap.
    pub promoted: usize,
}

/// Plans the steps of one engine.
#[derive(Clone, Debug)]
pub struct Planner {
    running: Running,
    slots: Slots,
    max_adapters: Option<usize>,
    look: Look,
    /// Steps since residents last decoded, of those that have waited; and who had a slot while others had none.
    waited: FxHashMap<u64, u32>,
    holders: FxHashSet<u64>,
    /// Numbers of the planned step's contenders and of those for whom it has nothing, and whether anybody is passed over.
    contenders: Vec<u64>,
    idle: Vec<u64>,
    gates: bool,
}

impl Planner {
    /// Nobody has waited yet.
    pub fn new(rules: &Rules) -> Self {
        Self {
            running: Running::new(rules.slots, rules.step_tokens, rules.block_size, rules.groups),
            slots: Slots::new(rules.slots, rules.wait_cap_steps, rules.hysteresis),
            max_adapters: rules.max_adapters,
            look: Look::Leave,
            waited: FxHashMap::default(),
            holders: FxHashSet::default(),
            contenders: Vec::new(),
            idle: Vec::new(),
            gates: false,
        }
    }

    /// Whether the next step of so many residents needs a plan; the list stays as it stands otherwise.
    pub fn look(&mut self, residents: usize, free_blocks: usize) -> bool {
        self.look = self.running.look(residents, free_blocks, self.max_adapters.is_some());
        self.contenders.clear();
        self.idle.clear();
        self.gates = false;
        self.look != Look::Leave
    }

    /// Whether the plan goes by keys.
    pub fn wants_keys(&self, residents: &[Active]) -> bool {
        let decoding = residents.iter().filter(|resident| resident.class == Class::Decoding).count();
        self.look == Look::ArrangeByKey || self.slots.bind(decoding) || self.is_crowded(residents)
    }

    /// The next step. Where memory is short the worst comes last, since that is whom the engine preempts.
    pub fn plan(&mut self, residents: &[Active]) -> Plan {
        let short = self.look == Look::ArrangeByKey;
        let mut listed: Vec<Resident> = residents.iter().zip(0..).map(|(r, i)| self.listed(r, i)).collect();
        for i in self.beyond(residents) {
            listed[i].part = Part::Gated;
        }
        let could = |i: usize| residents[i].class == Class::Decoding && listed[i].part == Part::Decodes;
        let mut decoding: Vec<usize> = (0..residents.len()).filter(|&i| could(i)).collect();
        let mut promoted = 0;
        if self.slots.bind(decoding.len()) {
            decoding.sort_unstable_by_key(|&i| residents[i].number);
            let contenders: Vec<Contender> = decoding.iter().map(|&i| self.contender(&listed[i])).collect();
            let choice = self.slots.choose(&contenders);
            promoted = choice.promoted;
            decoding.iter().for_each(|&i| listed[i].part = Part::Gated);
            choice.chosen.iter().for_each(|&at| listed[decoding[at as usize]].part = Part::Decodes);
        }
        let gated: Vec<u32> = which(&listed, |_, resident| resident.part == Part::Gated);
        let counts = |i: usize, r: &Resident| residents[i].class == Class::Decoding || r.part == Part::Gated;
        let contenders = which(&listed, counts);
        self.contenders.extend(contenders.iter().map(|&i| residents[i as usize].number));
        self.idle.extend(residents.iter().filter(|r| r.class == Class::Idle).map(|r| r.number));
        self.gates = !gated.is_empty();
        Plan { order: order(&listed, short), gated, contenders, promoted }
    }

    /// Takes note of who of the plan's contenders got a token in the step.
    pub fn scheduled(&mut self, got: &[bool]) {
        let mut waited = FxHashMap::default();
        // In a pipeline who has a slot is idle while its token is on its way, and comes back to it.
        let holders = &mut self.holders;
        let kept: FxHashSet<u64> = self.idle.drain(..).filter(|number| holders.contains(number)).collect();
        *holders = kept;
        for (number, &got) in self.contenders.drain(..).zip(got) {
            if !got {
                waited.insert(number, self.waited.get(&number).map_or(1, |steps| steps.saturating_add(1)));
            } else if self.gates {
                self.holders.insert(number);
            }
        }
        self.waited = waited;
    }

    /// Who must still be passed over when the slots are the engine's own again: residents of more adapters than fit.
    pub fn settle(&mut self, residents: &[Active]) -> Vec<u32> {
        self.look = Look::Leave;
        self.waited.clear();
        self.holders.clear();
        self.beyond(residents).into_iter().map(|i| i as u32).collect()
    }

    fn is_crowded(&self, residents: &[Active]) -> bool {
        let active = residents.iter().filter(|resident| resident.class != Class::Idle);
        self.max_adapters.is_some_and(|most| adapters::count(active.map(|resident| resident.adapter)) > most)
    }

    fn beyond(&self, residents: &[Active]) -> Vec<usize> {
        let Some(most) = self.max_adapters.filter(|_| self.is_crowded(residents)) else { return Vec::new() };
        let active: Vec<usize> = (0..residents.len()).filter(|&i| residents[i].class != Class::Idle).collect();
        let adapted = |&i: &usize| {
            let number = residents[i].number;
            let waited = self.waited.get(&number).copied().unwrap_or(0);
            let overdue = if self.slots.is_overdue(waited) { waited } else { 0 };
            Adapted { adapter: residents[i].adapter, key: Self::key(&residents[i]), number, overdue }
        };
        let adapted: Vec<Adapted> = active.iter().map(adapted).collect();
        adapters::beyond(&adapted, most).into_iter().map(|at| active[at]).collect()
    }

    fn key(resident: &Active) -> f64 {
        key_of_ln(resident.ln_remaining, 1.0, resident.aged, 0.0, 0.0)
    }

    fn listed(&self, resident: &Active, stands: u64) -> Resident {
        let part = match resident.class {
            Class::Idle => Part::Idle,
            Class::Decoding => Part::Decodes,
            Class::Prefilling => Part::Prefills,
        };
        Resident { part, key: Self::key(resident), number: resident.number, stands }
    }

    fn contender(&self, resident: &Resident) -> Contender {
        Contender {
            key: resident.key,
            waited: self.waited.get(&resident.number).copied().unwrap_or(0),
            holds: self.holders.contains(&resident.number),
        }
    }
}

fn which(residents: &[Resident], is: impl Fn(usize, &Resident) -> bool) -> Vec<u32> {
    residents.iter().enumerate().filter(|&(i, resident)| is(i, resident)).map(|(i, _)| i as u32).collect()
}
