//! The order of vLLM's running list. It is that of admission until the slots lever arranges it, and says in which order
//! requests that end with one step give their blocks back, and so whose cached blocks are handed out first.

use super::engine::Engine;
use crate::levers::{Look, Part, Resident, order};

impl Engine<'_> {
    /// Arranges the list for the next step as the slots lever does.
    pub(super) fn arrange(&mut self) {
        // Without a prefix cache nothing depends on the order but who is preempted, and that is asked for then.
        if !self.spec.levers.slots || !self.config.enable_prefix_caching {
            return;
        }
        let look = self.slots.list.look(self.seats.residents.len(), self.kv.pool.free() as usize, false);
        if look == Look::Leave {
            return;
        }
        let short = look == Look::ArrangeByKey;
        let idle = self.seats.residents.iter().copied().filter(|&id| self.is_ending(id));
        let idle = idle.map(|id| self.resident(id, Part::Idle, false));
        let mut listed = Vec::with_capacity(self.seats.residents.len());
        // By `for_each`, since chained iterators are slow from outside.
        idle.chain(self.listed(short)).for_each(|resident| listed.push(resident));
        for i in order(&listed, short) {
            self.requests[listed[i as usize].number as usize].admitted = self.seats.places;
            self.seats.places += 1;
        }
    }

    /// All residents for whom the step has something, or could have; `by_key` where keys will be asked for.
    pub(super) fn listed(&self, by_key: bool) -> impl Iterator<Item = Resident> + Clone {
        let decodes = self.decoding.members().map(|id| (id, Part::Decodes));
        let prefills = self.seats.prefilling.iter().map(|&id| (id, Part::Prefills));
        let gated = self.seats.ready.iter().map(|&id| (id, Part::Gated));
        decodes.chain(prefills).chain(gated).map(move |(id, part)| self.resident(id, part, by_key))
    }

    #[inline]
    fn resident(&self, id: u32, part: Part, by_key: bool) -> Resident {
        let key = if by_key { self.ranker.slot_key(id, self.generated(id)) } else { 0.0 };
        Resident { part, key, number: u64::from(id), stands: self.requests[id as usize].admitted }
    }
}
