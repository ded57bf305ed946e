//! Seats and KV blocks of the simulated engine: what a request may reuse, who gives way, and what is left of one that
//! did.

use rustc_hash::FxHashMap;

use super::blocks::Held;
use super::engine::Engine;
use super::state::Step;

/// What the first of the queue lacks.
pub(super) struct Claim<'a> {
    /// Its key; infinitely good when it has waited past the cap.
    pub(super) key: f64,
    /// Cached blocks that it starts from.
    pub(super) hit: &'a [Held],
    /// Free blocks that it takes.
    pub(super) need: u32,
}

impl Engine<'_> {
    /// Blocks that hold `tokens` tokens.
    pub(super) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.config.block_size)
    }

    /// Hash of the `index`-th block of a request's prompt, where the trace knows it.
    fn shared_hash(&self, id: u32, index: u32) -> Option<u64> {
        let row = self.input.rows[id as usize] as usize;
        let hashes = &self.trace.prefix_blocks.as_ref()?[row];
        let per_hash = self.trace.prefix_block_size / self.config.block_size;
        let hash = hashes.get((index / per_hash.max(1)) as usize)?;
        // One hash may name several of the engine's blocks; and no prefix is shared between copies of a trace.
        let copy = id as usize / self.input.round;
        let part = u64::from(index % per_hash.max(1));
        let mixed = hash ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (copy as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        // 0 means no hash in the pool, but is the first block's in traces that number their blocks.
        Some(if mixed == 0 { u64::MAX } else { mixed })
    }

    /// The leading blocks that a waiting request finds in the cache: shared ones by hash, and its own if it was
    /// preempted. At least one token is left to compute, since only that gives a next token.
    pub(super) fn cached_blocks(&self, id: u32) -> Vec<Held> {
        if !self.config.enable_prefix_caching {
            return Vec::new();
        }
        let request = &self.requests[id as usize];
        let most = (request.prompt + request.generated - 1) / self.config.block_size;
        let own_full = (request.computed / self.config.block_size) as usize;
        let mut hit = Vec::new();
        for index in 0..most {
            // By hash first: another holder's copy costs no free block.
            let shared = self.shared_hash(id, index).and_then(|hash| self.pool.find(hash));
            let own = request.blocks[..own_full.min(request.blocks.len())].get(index as usize).copied();
            match shared.or(own.filter(|&held| self.pool.is_intact(held))) {
                Some(held) => hit.push(held),
                None => break,
            }
        }
        hit
    }

    /// Prompt tokens that the trace says were cached from outside, in whole blocks.
    pub(super) fn outside_prefix(&self, id: u32, target: u32) -> u32 {
        let Some(prefixes) = &self.trace.prefix_tokens else { return 0 };
        if !self.config.enable_prefix_caching {
            return 0;
        }
        let prefix = prefixes[self.input.rows[id as usize] as usize].min(target - 1);
        prefix - prefix % self.config.block_size
    }

    /// Makes the prompt blocks `from..to` of a request findable by others.
    pub(super) fn publish_blocks(&mut self, id: u32, from: u32, to: u32) {
        if self.trace.prefix_blocks.is_none() || !self.config.enable_prefix_caching {
            return;
        }
        let full = self.requests[id as usize].prompt / self.config.block_size;
        for index in from..to.min(full) {
            if let Some(hash) = self.shared_hash(id, index) {
                self.pool.publish(self.requests[id as usize].blocks[index as usize], hash);
            }
        }
    }

    /// Frees a request's blocks, the last first: the tail of a prefix is the least likely to be asked for again.
    pub(super) fn release_blocks(&mut self, id: u32) {
        for i in (0..self.requests[id as usize].blocks.len()).rev() {
            let held = self.requests[id as usize].blocks[i];
            self.pool.release(held);
        }
    }

    /// Gives up the seat of `id`.
    pub(super) fn leave_seat(&mut self, id: u32) {
        self.requests[id as usize].is_resident = false;
        if let Some(place) = self.residents.iter().position(|&other| other == id) {
            self.residents.swap_remove(place);
        }
    }

    /// Who loses its KV cache when blocks run out: under the slots lever the resident with the worst key, else, as in
    /// vLLM, the one admitted last. A request whose last token is already under way is past that.
    pub(super) fn victim(&self) -> Option<u32> {
        let candidates = self.residents.iter().copied().filter(|&id| !self.is_ending(id));
        if self.spec.levers.slots {
            let keyed = candidates.map(|id| (self.ranker.slot_key(id, self.generated(id)), id));
            keyed.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(_, id)| id)
        } else {
            candidates.max_by_key(|&id| self.requests[id as usize].admitted)
        }
    }

    fn is_ending(&self, id: u32) -> bool {
        let request = &self.requests[id as usize];
        request.generated == request.output && !self.decoding.contains(id)
    }

    /// Takes seat and blocks from a resident and puts it back into the queue; its tokens are recomputed later, less
    /// what is still cached then.
    pub(super) fn preempt(&mut self, id: u32) {
        if self.decoding.contains(id) {
            self.stop_decoding(id);
        } else {
            self.prefilling.retain(|&other| other != id);
            self.ready.retain(|&other| other != id);
        }
        self.release_blocks(id);
        self.leave_seat(id);
        self.requests[id as usize].preemptions += 1;
        self.tally.preemptions += 1;
        if let Some(log) = &mut self.log {
            log.preempt(id);
        }
        self.slots_changed = true;
        self.enqueue(id, self.now);
    }

    /// The evict lever: preempts the worst residents, each by `evict_factor` worse than the key of the one that waits,
    /// until that one has a seat and its blocks; nobody, if that cannot be reached. Who prefills is left alone.
    pub(super) fn evict_for(&mut self, claim: &Claim, step: &Step) -> bool {
        let rate = self.spec.evict_per_s;
        if rate <= 0.0 || self.now < self.next_evict_s {
            return false;
        }
        let bar = claim.key + self.spec.evict_factor.ln();
        let prefills = |id: &u32| self.prefilling.contains(id) || step.prefilled.contains(id);
        let mut worse: Vec<(f64, u32)> = self
            .residents
            .iter()
            .filter(|&&id| !self.is_ending(id) && !prefills(&id))
            .map(|&id| (self.ranker.evict_key(id, self.generated(id)), id))
            .filter(|&(own, _)| own > bar)
            .collect();
        worse.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let (mut free, mut need) = (self.pool.free(), claim.need);
        // Victims may share blocks with each other, and the one that waits may count on theirs.
        let mut let_go: FxHashMap<u32, u32> = FxHashMap::default();
        let mut victims = Vec::new();
        let enough = worse.iter().any(|&(_, id)| {
            victims.push(id);
            for &held in &self.requests[id as usize].blocks {
                let times = let_go.entry(held.block).or_insert(0);
                *times += 1;
                if *times == self.pool.references(held) {
                    free += 1;
                    need += u32::from(claim.hit.contains(&held));
                }
            }
            let spare = if victims.len() < self.residents.len() { self.watermark_blocks() } else { 0 };
            need + spare <= free
        });
        if enough {
            self.next_evict_s = self.now + victims.len() as f64 / rate;
            for id in victims {
                self.preempt(id);
            }
        }
        enough
    }

    /// Blocks that an admission beside other residents must leave free.
    pub(super) fn watermark_blocks(&self) -> u32 {
        (self.config.watermark * f64::from(self.config.usable_blocks())) as u32
    }
}
