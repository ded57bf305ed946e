//! What one step does, decided in vLLM's order: the sequences that decode get their blocks, prefills under way go on,
//! and only if nobody had to give way is the queue asked, up to the first request that does not fit.

use super::engine::Engine;
use super::state::Step;
use crate::levers::Contender;

impl Engine<'_> {
    /// Composes the next step; `None` when there is nothing to do. Progress is booked here, as vLLM does when it
    /// schedules, so that the next composition can go on before the step has run.
    pub(super) fn compose(&mut self) -> Option<Step> {
        let mut step = Step::default();
        self.held = false;
        self.end_resumed_prefills();
        let evicted = self.evict();
        self.choose_decoders(&mut step);
        self.arrange();
        self.reserve_decode_blocks(&mut step);
        self.take_blocks(1);
        let mut budget = self.config.max_num_batched_tokens - self.decoding.len();
        self.continue_prefills(&mut step, &mut budget);
        if !step.preempted {
            self.admit(&mut step, &mut budget);
        }
        step.preempted |= !evicted.is_empty();
        for id in evicted {
            self.requeue(id);
        }
        self.note_refusal(budget);
        let gated = if self.slots.bound { self.seats.ready.len() } else { 0 };
        self.ranker.clock.step(self.now, (self.waiting.len() + gated) as u64);
        // Only now: until their last token has come the engine does not know that they are about to end.
        for id in std::mem::take(&mut self.passing) {
            self.waiting.remove(id, self.requests[id as usize].prompt, self.now);
        }
        if self.decoding.len() == 0 && step.work.prefill == 0 {
            return None;
        }
        step.work.decode = self.decoding.len();
        step.work.kv_tokens = self.decoding.kv_tokens();
        self.tally.recomputed_tokens += u64::from(step.recomputed);
        let computed = u64::from(step.work.decode) + u64::from(step.work.prefill);
        self.tally.computed_tokens += computed;
        if let Some(admission) = &mut self.admission {
            admission.stepped(computed, u64::from(step.recomputed), 1);
        }
        // A victim may have been among those that came back to decode.
        step.resumed.retain(|&(id, _)| self.decoding.contains(id));
        // Or among those whose prefill would have ended: their token is lost with their blocks.
        step.prefilled.retain(|&id| self.requests[id as usize].is_resident);
        if self.written.log.is_some() {
            step.scheduled.retain(|&(id, _)| self.requests[id as usize].is_resident);
            step.scheduled.extend(self.decoding.members().map(|id| (id, 1)));
        }
        self.decoding.advance(1);
        self.finish_decoding(&mut step.done);
        for &id in &step.prefilled {
            let now = self.decoding.step();
            let request = &mut self.requests[id as usize];
            request.generated += 1;
            request.last_decode_step = now;
            request.token_step = now;
            if request.generated == request.output {
                step.done.push(id);
            } else {
                self.seats.ready.push(id);
                self.slots.changed = true;
            }
        }
        Some(step)
    }

    /// Tokens that `id` has generated.
    pub(super) fn generated(&self, id: u32) -> u32 {
        self.requests[id as usize].generated + self.decoding.progress(id)
    }

    /// A resumed request that lacks nothing but its last token is as any other that could decode.
    fn end_resumed_prefills(&mut self) {
        let requests = &self.requests;
        let lacks_one = |id: &mut u32| {
            let request = &requests[*id as usize];
            request.computed >= request.prompt && request.prompt + request.generated == request.computed + 1
        };
        let resumed: Vec<u32> = self.seats.prefilling.extract_if(.., lacks_one).collect();
        for id in resumed {
            self.requests[id as usize].last_decode_step = self.decoding.step();
            self.seats.ready.push(id);
            self.slots.changed = true;
        }
    }

    /// Residents that could decode.
    pub(super) fn contenders(&self) -> usize {
        self.decoding.len() as usize + self.seats.ready.len()
    }

    fn choose_decoders(&mut self, step: &mut Step) {
        if !self.slots.rule.bind(self.contenders()) {
            for id in std::mem::take(&mut self.seats.ready) {
                self.start_decoding(id, step);
            }
            self.slots.bound = false;
            return;
        }
        let now = self.decoding.step();
        if !self.slots.changed && now < self.slots.next_choice {
            return;
        }
        let mut ids: Vec<u32> = self.decoding.members().chain(self.seats.ready.iter().copied()).collect();
        ids.sort_unstable();
        let contender = |&id: &u32| {
            let decodes = self.decoding.contains(id);
            let waited = if decodes { 0 } else { (now - self.requests[id as usize].last_decode_step) as u32 };
            let key = self.ranker.slot_key(id, self.generated(id));
            Contender { key, waited, holds: self.slots.bound && decodes }
        };
        let contenders: Vec<Contender> = ids.iter().map(contender).collect();
        let choice = self.slots.rule.choose(&contenders);
        self.tally.wait_cap_promotions += choice.promoted as u64;
        let mut is_chosen = vec![false; ids.len()];
        choice.chosen.iter().for_each(|&i| is_chosen[i as usize] = true);
        self.seats.ready = ids.iter().zip(&is_chosen).filter(|(_, chosen)| !**chosen).map(|(&id, _)| id).collect();
        for (&id, &is_chosen) in ids.iter().zip(&is_chosen) {
            match (self.decoding.contains(id), is_chosen) {
                (true, false) => self.stop_decoding(id),
                (false, true) => self.start_decoding(id, step),
                _ => {}
            }
        }
        self.slots.changed = false;
        self.slots.bound = true;
        // One that was overdue has its one token after this step, and competes by its key again.
        self.slots.next_choice = if choice.overdue > 0 { now + 1 } else { self.next_choice() };
    }

    /// The step at which the choice of slots may come out otherwise although nobody came or went.
    fn next_choice(&self) -> u64 {
        let now = self.decoding.step();
        let rekey = self.decoding.members().map(|id| {
            let generated = self.generated(id);
            now + u64::from(self.ranker.next_rekey(generated) - generated)
        });
        let starving = self.seats.ready.iter().filter_map(|&id| {
            let cap = u64::from(self.spec.wait_cap_steps?);
            Some((self.requests[id as usize].last_decode_step + cap).max(now + 1))
        });
        rekey.chain(starving).min().unwrap_or(u64::MAX)
    }

    fn start_decoding(&mut self, id: u32, step: &mut Step) {
        let request = &self.requests[id as usize];
        if request.last_token_s < self.horizon {
            step.resumed.push((id, request.last_token_s));
        }
        self.decoding.join(id, request.computed, request.output - request.generated);
    }

    /// Books the progress of a decoding sequence and takes it out of the decode set.
    pub(super) fn stop_decoding(&mut self, id: u32) {
        let progress = self.decoding.progress(id);
        let request = &mut self.requests[id as usize];
        request.generated += progress;
        request.computed += progress;
        if progress > 0 {
            request.in_a_row = progress > 1 || request.token_step + 1 == self.decoding.step();
            request.token_step = self.decoding.step();
            request.last_token_s = self.horizon;
            request.last_decode_step = self.decoding.step();
            request.decoded_step = self.decoding.step();
        }
        self.decoding.leave(id, request.computed);
        self.slots.changed = true;
    }

    /// Takes those out that have generated their last token in the step just booked.
    pub(super) fn finish_decoding(&mut self, done: &mut Vec<u32>) {
        while let Some(id) = self.decoding.pop_finished() {
            self.stop_decoding(id);
            done.push(id);
        }
    }

    fn reserve_decode_blocks(&mut self, step: &mut Step) {
        while self.decoding.need_block(1).len() > self.kv.reserved.len() + self.kv.pool.free() as usize {
            // Nobody is preempted before all free blocks are given away; those of the victim go to the others.
            self.kv.reserved.extend(std::iter::from_fn(|| self.kv.pool.allocate()));
            let Some(victim) = self.victim() else { break };
            self.preempt(victim);
            step.preempted = true;
        }
    }

    /// Gives the blocks that the next `steps` steps need to those that decode in them.
    pub(super) fn take_blocks(&mut self, steps: u64) {
        for ahead in 1..=steps {
            for &id in self.decoding.need_block(ahead) {
                if let Some(held) = self.kv.reserved.pop().or_else(|| self.kv.pool.allocate()) {
                    self.requests[id as usize].blocks.push(held);
                }
            }
        }
    }

    fn continue_prefills(&mut self, step: &mut Step, budget: &mut u32) {
        if self.seats.prefilling.is_empty() {
            return;
        }
        for id in self.seats.prefilling.clone() {
            let request = &self.requests[id as usize];
            if *budget == 0 || !request.is_resident {
                continue;
            }
            let chunk = (request.prompt + request.generated - request.computed).min(*budget);
            let need = self.blocks_for(request.computed + chunk) - request.blocks.len() as u32;
            while need > self.kv.pool.free() {
                let Some(victim) = self.victim() else { return };
                self.preempt(victim);
                step.preempted = true;
                if victim == id {
                    break;
                }
            }
            if !self.requests[id as usize].is_resident {
                continue;
            }
            self.prefill(id, chunk, step);
            *budget -= chunk;
        }
    }

    /// Books a prefill chunk, with the blocks for it.
    fn prefill(&mut self, id: u32, chunk: u32, step: &mut Step) {
        let computed = self.requests[id as usize].computed;
        step.work.add_chunk(chunk, computed);
        if self.written.log.is_some() {
            step.scheduled.push((id, chunk));
        }
        let held = self.requests[id as usize].blocks.len() as u32;
        for _ in held..self.blocks_for(computed + chunk) {
            if let Some(block) = self.kv.pool.allocate() {
                self.requests[id as usize].blocks.push(block);
            }
        }
        // From the first block that may have become full; a prefix cached from outside brings whole ones.
        let from = held.min(computed / self.config.block_size);
        self.publish_blocks(id, from, (computed + chunk) / self.config.block_size);
        let request = &mut self.requests[id as usize];
        request.computed += chunk;
        if request.computed == request.prompt + request.generated {
            step.prefilled.push(id);
            self.seats.prefilling.retain(|&other| other != id);
        }
    }

    fn admit(&mut self, step: &mut Step, budget: &mut u32) {
        while *budget > 0 {
            let Some(head) = self.waiting.head(self.now, &self.input.arrival_s) else { return };
            let id = head.id;
            let no_seat = self.seats.residents.len() as u32 >= self.config.max_num_seqs;
            let known = self.config.reserve_full_prompt && self.config.enable_chunked_prefill;
            let still_blocked = known && self.kv.blocked == Some((id, self.kv.pool.gains()));
            step.blocked_by_memory |= still_blocked && !no_seat;
            step.blocked_by_seats |= no_seat;
            if no_seat || still_blocked {
                return;
            }
            let hit = self.cached_blocks(id);
            let request = &self.requests[id as usize];
            let target = request.prompt + request.generated;
            let computed = (hit.len() as u32 * self.config.block_size).max(self.outside_prefix(id, target));
            let left = target - computed;
            if left > *budget && !self.config.enable_chunked_prefill {
                return;
            }
            let chunk = left.min(*budget);
            let reach = if self.config.reserve_full_prompt { target } else { computed + chunk };
            let mut need = self.blocks_for(reach) - hit.len() as u32;
            let free_hits = hit.iter().filter(|&&held| self.kv.pool.is_free(held)).count() as u32;
            need += free_hits;
            let spare = if self.seats.residents.is_empty() { 0 } else { self.watermark_blocks() };
            if need + spare > self.kv.pool.free() {
                step.blocked_by_memory = true;
                self.kv.blocked = Some((id, self.kv.pool.gains()));
                return;
            }
            if !self.lets_in(id, hit.len() as u32 - free_hits) {
                return;
            }
            self.waiting.remove(id, self.requests[id as usize].prompt, self.now);
            self.tally.wait_cap_promotions += u64::from(head.promoted);
            for &held in &hit {
                self.kv.pool.acquire(held);
            }
            self.tally.cached_tokens += u64::from(computed);
            let request = &mut self.requests[id as usize];
            if request.preemptions > 0 {
                step.recomputed += target - computed;
            }
            request.blocks = hit;
            request.computed = computed;
            request.is_resident = true;
            request.admitted = self.seats.places;
            if request.admitted_s.is_nan() {
                request.admitted_s = self.now;
            }
            self.seats.places += 1;
            self.seats.residents.push(id);
            self.seats.prefilling.push(id);
            self.prefill(id, chunk, step);
            *budget -= chunk;
        }
    }
}
