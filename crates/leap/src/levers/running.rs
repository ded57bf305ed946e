//! The order of the running list. An engine goes through it from the front, hands out tokens and blocks as it goes, and
//! preempts its last request when blocks run out, so the order decides both.

use super::rank_of_key;

/// What the step has for a resident, in the order in which they stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Nothing. Preempting one whose last token is under way would gain little.
    Idle,
    /// One token. Before the prefills, whose chunks could take all tokens.
    Decodes,
    /// A chunk of its prompt.
    Prefills,
    /// It is passed over.
    Gated,
}

/// A resident for whom a place is sought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resident {
    /// What the step has for it.
    pub part: Part,
    /// Smaller is better; read only where memory is short.
    pub key: f64,
    /// Place in the order of arrival.
    pub number: u64,
    /// Place in the list as it stands.
    pub stands: u64,
}

/// What is to be done with the list before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing.
    Leave,
    /// Everybody gets a token or a chunk, or slots bind: arrange it by parts.
    Arrange,
    /// The step might run out of blocks: arrange it by parts, and by key in them.
    ArrangeByKey,
}

/// When the running list of one engine has to be arranged.
#[derive(Clone, Debug)]
pub struct Running {
    slots: usize,
    step_blocks: usize,
    groups: usize,
    /// Whether a request that decodes may stand behind a prefill, where tokens can run out before its turn.
    shuffled: bool,
}

impl Running {
    /// A list of which `slots` decode in a step of at most `step_tokens`, each in `groups` KV caches of blocks of
    /// `block_size` tokens.
    pub fn new(slots: usize, step_tokens: usize, block_size: usize, groups: usize) -> Self {
        Self { slots, step_blocks: step_tokens.div_ceil(block_size.max(1)), groups: groups.max(1), shuffled: false }
    }

    /// Whether a step might run out of blocks: more than it can take at most are free otherwise.
    pub fn memory_is_short(&self, residents: usize, free_blocks: usize) -> bool {
        free_blocks < (2 * residents + self.step_blocks) * self.groups
    }

    /// What is to be done with the list of so many residents. `bound`: whether more than slots and memory bind.
    pub fn look(&mut self, residents: usize, free_blocks: usize, bound: bool) -> Look {
        let short = self.memory_is_short(residents, free_blocks);
        let roomy = residents <= self.slots && !bound && !short;
        let shuffled = std::mem::replace(&mut self.shuffled, !roomy);
        match (short, roomy && !shuffled) {
            (true, _) => Look::ArrangeByKey,
            (false, true) => Look::Leave,
            (false, false) => Look::Arrange,
        }
    }
}

/// Indices of `residents` in the order in which the engine is to look at them.
pub fn order(residents: &[Resident], memory_is_short: bool) -> Vec<u32> {
    let gates = residents.iter().any(|resident| resident.part == Part::Gated);
    let places: Vec<_> = residents.iter().map(|resident| place(resident, memory_is_short, gates)).collect();
    let mut order: Vec<u32> = (0..residents.len() as u32).collect();
    // Bare indices sort faster than what they stand for.
    order.sort_unstable_by_key(|&i| places[i as usize]);
    order
}

/// Number of the one who stands last where memory is short, and so loses its blocks when they run out: what [`order`]
/// would say of the same residents, for an engine that needs to know nothing else. `key` is asked only of those among
/// whom it decides.
pub fn last_by_key(residents: impl Iterator<Item = Resident> + Clone, key: impl Fn(u64) -> f64) -> Option<u64> {
    let behind = |resident: &Resident| place(resident, true, true).0;
    let last = residents.clone().map(|resident| behind(&resident)).max()?;
    let keyed = residents.filter(|resident| behind(resident) == last);
    let keyed = keyed.map(|resident| Resident { key: key(resident.number), ..resident });
    keyed.max_by_key(|resident| place(resident, true, true)).map(|resident| resident.number)
}

/// Where memory is short the worst of those that decode, and of the others together, stand last. Otherwise everybody
/// keeps its place in its part, but where some are gated, who decodes changes from step to step: then by arrival.
fn place(resident: &Resident, memory_is_short: bool, gates: bool) -> (Part, u64, u64) {
    let Resident { part, key, number, stands } = *resident;
    match part {
        Part::Idle => (part, stands, number),
        _ if memory_is_short => (part.min(Part::Prefills), rank_of_key(key), number),
        Part::Decodes if !gates => (part, stands, number),
        Part::Prefills => (part, stands, number),
        Part::Decodes | Part::Gated => (part, 0, number),
    }
}
