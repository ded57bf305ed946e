//! Seats and KV blocks of the simulated engine: what a request may reuse, who gives way, and what is left of one that
//! did.

use super::blocks::Held;
use super::engine::Engine;
use crate::levers::{Candidate, Claim, last_by_key};

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
            let shared = self.shared_hash(id, index).and_then(|hash| self.kv.pool.find(hash));
            let own = request.blocks[..own_full.min(request.blocks.len())].get(index as usize).copied();
            match shared.or(own.filter(|&held| self.kv.pool.is_intact(held))) {
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
                self.kv.pool.publish(self.requests[id as usize].blocks[index as usize], hash);
            }
        }
    }

    /// Frees a request's blocks, the last first: the tail of a prefix is the least likely to be asked for again.
    pub(super) fn release_blocks(&mut self, id: u32) {
        let request = &self.requests[id as usize];
        let cached = if self.config.enable_prefix_caching { request.computed / self.config.block_size } else { 0 };
        for (i, &held) in request.blocks.iter().enumerate().rev() {
            self.kv.pool.release(held, i < cached as usize);
        }
    }

    /// Gives up the seat of `id`.
    pub(super) fn leave_seat(&mut self, id: u32) {
        self.requests[id as usize].is_resident = false;
        if let Some(admission) = &mut self.admission {
            admission.left(u64::from(id));
        }
        if let Some(place) = self.seats.residents.iter().position(|&other| other == id) {
            self.seats.residents.swap_remove(place);
        }
    }

    /// Who loses its KV cache when blocks run out: as in vLLM, the last in its list. Without the slots lever that is the
    /// one admitted last; under it the list has been arranged, since memory is short, but not for those who have nothing
    /// more to get.
    pub(super) fn victim(&self) -> Option<u32> {
        if self.spec.levers.slots {
            let key = |number| self.ranker.slot_key(number as u32, self.generated(number as u32));
            return last_by_key(self.listed(false), key).map(|number| number as u32);
        }
        self.seats.residents.iter().copied().max_by_key(|&id| self.requests[id as usize].admitted)
    }

    pub(super) fn is_ending(&self, id: u32) -> bool {
        let request = &self.requests[id as usize];
        request.generated == request.output && !self.decoding.contains(id)
    }

    /// Takes seat and blocks from a resident and puts it back into the queue; its tokens are recomputed later, less
    /// what is still cached then. One whose last token is under way waits until it has come, which is before the next
    /// composition.
    pub(super) fn preempt(&mut self, id: u32) {
        if self.is_ending(id) {
            self.passing.push(id);
        }
        if let Some(admission) = &mut self.admission {
            admission.preempted(u64::from(id));
        }
        self.give_way(id);
        self.requeue(id);
    }

    /// Puts a preempted request back into the queue: by its key, or, where the queue has none, before all others.
    pub(super) fn requeue(&mut self, id: u32) {
        if self.spec.levers.queue {
            return self.enqueue(id, self.now);
        }
        self.prepended += 1;
        self.waiting.push(id, -(self.prepended as f64), self.requests[id as usize].prompt, self.now);
    }

    fn give_way(&mut self, id: u32) {
        let decoding = self.decoding.contains(id);
        let decoded = self.decoding.progress(id) > 0 || self.requests[id as usize].decoded_step == self.decoding.step();
        if decoding {
            self.stop_decoding(id);
        } else {
            self.seats.prefilling.retain(|&other| other != id);
            self.seats.ready.retain(|&other| other != id);
        }
        let request = &mut self.requests[id as usize];
        if decoded && request.in_a_row && !self.flights.is_empty() {
            // vLLM caches a block when the token that fills it is known; when this one's was stored it was still under way.
            request.computed -= 1;
        }
        self.release_blocks(id);
        self.leave_seat(id);
        self.requests[id as usize].preemptions += 1;
        self.tally.preemptions += 1;
        if let Some(log) = &mut self.written.log {
            log.preempt(id);
        }
        self.slots.changed = true;
    }

    /// The evict lever, for the first of the queue if the last step refused it. Who gives way is put back into the queue
    /// when this step has gone through it.
    pub(super) fn evict(&mut self) -> Vec<u32> {
        if !self.spec.levers.evict || self.evictions.refused.is_none() || !self.evictions.evictor.ready(self.now) {
            return Vec::new();
        }
        let head = self.waiting.head(self.now, &self.input.arrival_s).map(|head| head.id);
        let Some(head) = head.filter(|_| head == self.evictions.refused) else { return Vec::new() };
        // What it may find cached is not looked up for this.
        let need = self.blocks_for(self.requests[head as usize].prompt + self.generated(head) + 1);
        let claim = Claim {
            key: self.ranker.evict_key(head, self.generated(head)),
            blocks: need as usize,
            seat: self.seats.residents.len() as u32 >= self.config.max_num_seqs,
        };
        let ids: Vec<u32> = self.decoding.members().chain(self.seats.ready.iter().copied()).collect();
        let candidate =
            |&id: &u32| Candidate { key: self.ranker.evict_key(id, self.generated(id)), number: u64::from(id) };
        let candidates: Vec<Candidate> = ids.iter().map(candidate).collect();
        let (requests, pool) = (&self.requests, &self.kv.pool);
        let own_blocks = |i: usize| {
            let held = &requests[ids[i] as usize].blocks;
            held.iter().filter(|&&held| pool.references(held) == 1).count()
        };
        let victims = self.evictions.evictor.victims(&claim, &candidates, own_blocks, pool.free() as usize, self.now);
        let victims: Vec<u32> = victims.into_iter().map(|i| ids[i]).collect();
        for &id in &victims {
            self.give_way(id);
        }
        victims
    }

    /// Takes down whom the composed step refused a seat or blocks, and not just tokens.
    pub(super) fn note_refusal(&mut self, budget: u32) {
        if self.spec.levers.evict {
            let head = self.waiting.head(self.now, &self.input.arrival_s);
            self.evictions.refused = head.filter(|_| budget > 0).map(|head| head.id);
        }
    }

    /// Blocks that an admission beside other residents must leave free.
    pub(super) fn watermark_blocks(&self) -> u32 {
        (self.config.watermark * f64::from(self.config.usable_blocks())) as u32
    }
}
