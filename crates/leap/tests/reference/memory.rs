//! Seats and blocks: what a request finds in the cache, who is let in and who has to go.

use super::Reference;
use super::pool::Content;

impl Reference<'_> {
    pub(super) fn content(&self, id: usize, block: usize) -> Content {
        let request = &self.requests[id];
        let parts = (self.trace.prefix_block_size / self.config.block_size).max(1) as usize;
        let in_prompt = (block + 1) * self.config.block_size as usize <= request.prompt as usize;
        let hashes = self.trace.prefix_blocks.as_ref().map(|blocks| &blocks[request.row]);
        match hashes.and_then(|hashes| hashes.get(block / parts)) {
            Some(&hash) if in_prompt => Content::Shared { hash, part: (block % parts) as u32 },
            _ => Content::Own { request: id, block },
        }
    }

    /// Cached blocks that a request can start from.
    pub(super) fn hits(&self, id: usize) -> Vec<usize> {
        if !self.config.enable_prefix_caching {
            return Vec::new();
        }
        let tokens = self.requests[id].prompt + self.requests[id].generated;
        let most = (tokens - 1) / self.config.block_size;
        (0..most as usize).map_while(|block| self.pool.find(self.content(id, block))).collect()
    }

    pub(super) fn blocks_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.config.block_size) as usize
    }

    /// Blocks that a request lacks to store so many tokens.
    pub(super) fn lacks(&self, id: usize, tokens: u32) -> usize {
        self.blocks_for(tokens) - self.requests[id].blocks.len()
    }

    /// Gives a request the blocks for so many tokens.
    pub(super) fn allocate(&mut self, id: usize, tokens: u32) {
        for _ in 0..self.lacks(id, tokens) {
            let block = self.pool.allocate();
            self.requests[id].blocks.push(block);
        }
    }

    /// Counts `more` tokens of a request, for which it has blocks, as stored.
    pub(super) fn store(&mut self, id: usize, more: u32) {
        let tokens = self.requests[id].stored + more;
        self.requests[id].stored = tokens;
        if self.config.enable_prefix_caching {
            for block in 0..(tokens / self.config.block_size) as usize {
                let content = self.content(id, block);
                self.pool.publish(self.requests[id].blocks[block], content);
            }
        }
    }

    pub(super) fn victim(&self) -> Option<usize> {
        let mut candidates = self.residents.iter().copied().filter(|&id| !self.requests[id].ends());
        if self.spec.levers.slots {
            candidates.max_by(|&x, &y| self.slot_key(x).total_cmp(&self.slot_key(y)).then(x.cmp(&y)))
        } else {
            candidates.next_back()
        }
    }

    pub(super) fn preempt(&mut self, id: usize, now: f64) {
        self.residents.retain(|&other| other != id);
        let request = &mut self.requests[id];
        let blocks = std::mem::take(&mut request.blocks);
        request.stored = 0;
        request.preemptions += 1;
        self.pool.release(&blocks);
        self.preemptions += 1;
        self.choose_anew = true;
        self.enqueue(id, now);
    }

    /// Tokens that a waiting request has to prefill.
    pub(super) fn left(&self, id: usize, hits: &[usize]) -> u32 {
        self.requests[id].prompt + self.requests[id].generated - hits.len() as u32 * self.config.block_size
    }

    /// The first chunk of a waiting request and the cached blocks that it starts from, if there is room for it.
    pub(super) fn fits(&self, id: usize, budget: u32) -> Option<(u32, Vec<usize>)> {
        let hits = self.hits(id);
        let cached = hits.len() as u32 * self.config.block_size;
        let tokens = self.requests[id].prompt + self.requests[id].generated;
        let left = self.left(id, &hits);
        if left > budget && !self.config.enable_chunked_prefill {
            return None;
        }
        let chunk = left.min(budget);
        let room_for = if self.config.reserve_full_prompt { tokens } else { cached + chunk };
        let idle_hits = hits.iter().filter(|&&block| self.pool.is_free(block)).count();
        let wanted = self.blocks_for(room_for) - hits.len() + idle_hits;
        let spare = if self.residents.is_empty() { 0.0 } else { self.config.watermark * self.pool.len() as f64 };
        let seat = self.residents.len() < self.config.max_num_seqs as usize;
        (seat && wanted + spare as usize <= self.pool.free()).then_some((chunk, hits))
    }

    /// The evict lever: preempts residents that decode or could, the worst first, until the head of the queue fits;
    /// nobody if it does not fit even then. Each must be `evict_factor` times worse than the head.
    pub(super) fn evict_for(
        &mut self,
        head: usize,
        overdue: bool,
        budget: u32,
        prefilling: &[usize],
        now: f64,
    ) -> bool {
        if !self.spec.levers.evict || now < self.next_eviction_s {
            return false;
        }
        let key = |id: usize| self.order_key(id, self.spec.memory_weight);
        let bar = if overdue { f64::NEG_INFINITY } else { key(head) + self.spec.evict_factor.ln() };
        let may_go = |&id: &usize| {
            !self.requests[id].ends() && !self.requests[id].prefills() && !prefilling.contains(&id) && key(id) > bar
        };
        let mut worse: Vec<usize> = self.residents.iter().copied().filter(may_go).collect();
        worse.sort_by(|&x, &y| key(y).total_cmp(&key(x)).then(y.cmp(&x)));
        // Try it: without the first of them, the first two, and so on.
        let (pool, residents) = (self.pool.clone(), self.residents.clone());
        let enough = (1..=worse.len()).find(|&count| {
            let victim = worse[count - 1];
            self.pool.release(&self.requests[victim].blocks);
            self.residents.retain(|&id| id != victim);
            self.fits(head, budget).is_some()
        });
        (self.pool, self.residents) = (pool, residents);
        let Some(count) = enough else { return false };
        for &victim in &worse[..count] {
            self.preempt(victim, now);
        }
        self.next_eviction_s = now + count as f64 / self.spec.evict_per_s;
        true
    }

    /// Makes a waiting request a resident.
    pub(super) fn admit(&mut self, id: usize, chunk: u32, hits: Vec<usize>, now: f64) {
        for &block in &hits {
            self.pool.share(block);
        }
        self.waiting.retain(|&other| other != id);
        self.residents.push(id);
        let request = &mut self.requests[id];
        self.waited_s += now - request.queued;
        request.stored = hits.len() as u32 * self.config.block_size;
        request.blocks = hits;
        request.target = request.prompt + request.generated;
        request.idle_steps = 0;
        self.allocate(id, self.requests[id].stored + chunk);
        self.store(id, chunk);
    }
}
