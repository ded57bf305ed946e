//! The order of vLLM's running list. It is that of admission until the slots lever arranges it, and says in which order
//! requests that end with one step give their blocks back, and so whose cached blocks are handed out first.

use super::engine::Engine;

impl Engine<'_> {
    /// Arranges the list for the next step as the slots lever does: those that have nothing to do, those that decode,
    /// then those that prefill and those without a slot.
    pub(super) fn arrange(&mut self) {
        // Without a prefix cache nothing depends on the order.
        if !self.spec.levers.slots || !self.config.enable_prefix_caching {
            return;
        }
        // More than a step can take at most are free otherwise.
        let most = 2 * self.residents.len() as u32 + self.blocks_for(self.config.max_num_batched_tokens);
        let short = self.pool.free() < most;
        let roomy = self.residents.len() as u32 <= self.config.slots() && !short;
        if !std::mem::replace(&mut self.shuffled, !roomy) && roomy {
            return;
        }
        let place = |&id: &u32| self.requests[id as usize].admitted;
        let mut idle: Vec<u32> = self.residents.iter().copied().filter(|&id| self.is_ending(id)).collect();
        idle.sort_unstable_by_key(place);
        let mut chosen: Vec<u32> = self.decoding.members().collect();
        let mut tail = self.prefilling.clone();
        if short {
            tail.extend(&self.ready);
            chosen = self.by_key(&chosen);
            tail = self.by_key(&tail);
        } else if self.ready.is_empty() {
            chosen.sort_unstable_by_key(place);
        } else {
            chosen.sort_unstable();
            let behind = tail.len();
            tail.extend(&self.ready);
            tail[behind..].sort_unstable();
        }
        for id in idle.into_iter().chain(chosen).chain(tail) {
            self.requests[id as usize].admitted = self.admissions;
            self.admissions += 1;
        }
    }

    fn by_key(&self, ids: &[u32]) -> Vec<u32> {
        let key = |&id: &u32| (self.ranker.slot_key(id, self.generated(id), false), id);
        let mut keyed: Vec<(f64, u32)> = ids.iter().map(key).collect();
        keyed.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        keyed.into_iter().map(|(_, id)| id).collect()
    }
}
