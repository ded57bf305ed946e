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

    pub(super) fn preempt(&mut self, id: usize, now: f64) {
        self.give_way(id);
        self.requeue(id, now);
    }

    pub(super) fn give_way(&mut self, id: usize) {
        self.residents.retain(|&other| other != id);
        let request = &mut self.requests[id];
        let blocks = std::mem::take(&mut request.blocks);
        let fills_block = request.stored.is_multiple_of(self.config.block_size);
        request.stored = 0;
        request.preemptions += 1;
        let (last, before) = request.token_steps;
        if self.in_flight && self.decoded.contains(&id) && fills_block && before + 1 == last {
            // The token that fills it was not known when it was stored, and without it the block has no name.
            self.pool.withdraw(blocks[blocks.len() - 1]);
        }
        self.pool.release(&blocks);
        self.preemptions += 1;
        self.choose_anew = true;
    }

    /// A preempted request waits again: by its key, or before all others where the queue has none.
    pub(super) fn requeue(&mut self, id: usize, now: f64) {
        self.enqueue(id, now);
        if !self.spec.levers.queue {
            self.prepended += 1.0;
            self.requests[id].key = -self.prepended;
        }
    }

    /// The running list as the slots lever arranges it: who has nothing to do, who decodes, the others. Where a step
    /// might run out of blocks the worst go last, since vLLM takes those of the last one.
    pub(super) fn arrange(&mut self, decoding: &mut [usize]) {
        let chunks = self.blocks_for(self.config.max_num_batched_tokens);
        let short = self.pool.free() < 2 * self.residents.len() + chunks;
        let roomy = self.residents.len() <= self.slots() && !short;
        if !std::mem::replace(&mut self.shuffled, !roomy) && roomy {
            return;
        }
        let idle = |id: &usize| self.requests[*id].ends();
        let prefills = |id: &usize| !self.could(*id);
        let (mut list, rest): (Vec<usize>, Vec<usize>) = self.residents.iter().copied().partition(idle);
        let (mut chosen, rest): (Vec<usize>, Vec<usize>) = rest.into_iter().partition(|id| decoding.contains(id));
        let (mut tail, mut gated): (Vec<usize>, Vec<usize>) = rest.into_iter().partition(prefills);
        if short || !gated.is_empty() {
            chosen.sort_unstable();
            gated.sort_unstable();
        }
        tail.extend(gated);
        if short {
            let by_key = |&x: &usize, &y: &usize| self.slot_key(x).total_cmp(&self.slot_key(y)).then(x.cmp(&y));
            chosen.sort_by(by_key);
            tail.sort_by(by_key);
        }
        decoding.copy_from_slice(&chosen);
        list.extend(chosen);
        list.extend(tail);
        self.residents = list;
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

    /// The evict lever, for the head that the last step refused: the worst of those that could decode give way, each
    /// `evict_factor` times worse than the head, until it has a seat and blocks for all its tokens and one; nobody if it
    /// would not have them even then.
    pub(super) fn evict(&mut self, now: f64) -> Vec<usize> {
        let head = self.head(now).map(|(id, _, _)| id);
        if !self.spec.levers.evict || now < self.next_eviction_s || head.is_none() || head != self.refused {
            return Vec::new();
        }
        let head = head.unwrap();
        let key = |id: usize| self.order_key(id, self.spec.memory_weight);
        let bar = key(head) + self.spec.evict_factor.ln();
        let mut worse: Vec<usize> =
            self.residents.iter().copied().filter(|&id| self.could(id) && key(id) > bar).collect();
        worse.sort_by(|&x, &y| key(y).total_cmp(&key(x)).then(y.cmp(&x)));
        let lacks = self.blocks_for(self.requests[head].prompt + self.requests[head].generated + 1);
        let room = |count: usize| {
            let alone = |id: &usize| self.requests[*id].blocks.iter().filter(|&&b| self.pool.users(b) == 1).count();
            let free = self.pool.free() + worse[..count].iter().map(alone).sum::<usize>();
            free >= lacks && self.residents.len() - count < self.config.max_num_seqs as usize
        };
        let enough = if room(0) { None } else { (1..=worse.len()).find(|&count| room(count)) };
        let Some(count) = enough else {
            self.next_eviction_s = now + 0.05;
            return Vec::new();
        };
        for &victim in &worse[..count] {
            self.give_way(victim);
        }
        self.next_eviction_s = now + count as f64 / self.spec.evict_per_s;
        worse.truncate(count);
        worse
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
