//! A second engine model, written from its specification alone and as plainly as possible: one step at a time, plain
//! lists, every choice made anew by looking at everybody. It is what the replayer's results are held against.

mod admission;
mod cost;
mod memory;
mod order;
mod pool;

use admission::{Clock, Room};
use cost::seconds;
use leap::remaining::next_level;
use leap::replay::{EngineConfig, Options, PolicySpec, Readouts, Rule, RunInput, Trace};
use pool::Pool;

/// One request, and all that happens to it.
#[derive(Clone, Default)]
pub struct Request {
    row: usize,
    prompt: u32,
    output: u32,
    arrival: f64,
    /// When the client sent it: later than `arrival` where the client holds requests back.
    sent: f64,
    /// When it came into the queue, the last time.
    queued: f64,
    /// Key in the queue while it waits.
    key: f64,
    /// How far the clock had come when it arrived, and the mean of the lengths that had finished by then.
    aged: f64,
    mean: Option<f64>,
    /// Blocks that it found with others when it was admitted.
    shared: usize,
    /// Another predictor's score, once it is there.
    score: Option<f64>,
    /// Tokens in the KV cache, the step just composed included.
    stored: u32,
    /// Tokens to store before it can decode.
    target: u32,
    /// Tokens made, the step just composed included.
    generated: u32,
    /// Step that made its last token, and the one that made the token before.
    token_steps: (u64, u64),
    /// Steps since it was last part of one.
    idle_steps: u32,
    blocks: Vec<usize>,
    delivered: u32,
    pub first_token_s: f64,
    pub finish_s: f64,
    pub preemptions: u32,
}

impl Request {
    fn prefills(&self) -> bool {
        self.stored < self.target
    }

    fn ends(&self) -> bool {
        self.generated == self.output
    }
}

/// A composed step: who gets a token when it ends, and how long it takes.
struct Step {
    tokens: Vec<usize>,
    seconds: f64,
}

pub struct Reference<'a> {
    trace: &'a Trace,
    config: &'a EngineConfig,
    spec: &'a PolicySpec,
    max_concurrency: usize,
    wait_cap_s: Option<f64>,
    max_tokens: f64,
    pub requests: Vec<Request>,
    pool: Pool,
    /// Requests sent so far; the rest follow in order.
    sent: usize,
    inside: usize,
    waiting: Vec<usize>,
    /// In order of admission.
    residents: Vec<usize>,
    finished: u32,
    finished_tokens: f64,
    /// Whether the slots are given anew in the next step, although the same requests could decode.
    choose_anew: bool,
    /// Who could decode in the last step, and who did.
    ready: Vec<usize>,
    decoded: Vec<usize>,
    /// Whether a step is under way while the next one is composed.
    in_flight: bool,
    /// Who had a slot in the last step, if others had none.
    holders: Vec<usize>,
    /// Whether the running list has been arranged for the last step.
    shuffled: bool,
    prepended: f64,
    clock: Clock,
    pub room: Room,
    pub recomputed_tokens: u64,
    /// The head that the last step refused a seat or blocks.
    refused: Option<usize>,
    next_eviction_s: f64,
    pub steps: u64,
    pub steps_with_queue: u64,
    pub steps_blocked_by_memory: u64,
    pub steps_blocked_by_seats: u64,
    pub computed_tokens: u64,
    pub cached_tokens: u64,
    pub promotions: u64,
    pub preemptions: u64,
    pub waited_s: f64,
}

impl<'a> Reference<'a> {
    pub fn new(
        trace: &'a Trace,
        input: &RunInput,
        config: &'a EngineConfig,
        spec: &'a PolicySpec,
        options: &Options,
    ) -> Self {
        let request = |(&row, &arrival): (&u32, &f64)| Request {
            row: row as usize,
            prompt: trace.prompt_tokens[row as usize],
            output: trace.output_tokens[row as usize],
            arrival,
            ..Request::default()
        };
        Self {
            trace,
            config,
            spec,
            max_concurrency: options.max_concurrency.map_or(usize::MAX, |most| most as usize),
            wait_cap_s: spec.wait_cap_s.or(options.wait_cap_s),
            max_tokens: f64::from(options.output_budget(trace, &Readouts::default())),
            requests: input.rows.iter().zip(&input.arrival_s).map(request).collect(),
            pool: Pool::new((config.kv_tokens / config.block_size) as usize),
            sent: 0,
            inside: 0,
            waiting: Vec::new(),
            residents: Vec::new(),
            finished: 0,
            finished_tokens: 0.0,
            choose_anew: false,
            ready: Vec::new(),
            decoded: Vec::new(),
            in_flight: false,
            holders: Vec::new(),
            shuffled: false,
            prepended: 0.0,
            clock: Clock::default(),
            room: Room::default(),
            recomputed_tokens: 0,
            refused: None,
            next_eviction_s: 0.0,
            steps: 0,
            steps_with_queue: 0,
            steps_blocked_by_memory: 0,
            steps_blocked_by_seats: 0,
            computed_tokens: 0,
            cached_tokens: 0,
            promotions: 0,
            preemptions: 0,
            waited_s: 0.0,
        }
    }

    pub fn run(&mut self) {
        let mut now = 0.0;
        self.take_in(now);
        loop {
            let preempted = self.preemptions;
            assert!(preempted < 100_000, "no end in sight");
            let Some(mut step) = self.compose(now) else {
                // Whoever gave up its blocks may have been the only one to run: the next step starts over at once.
                if self.preemptions > preempted {
                    continue;
                }
                if self.sent == self.requests.len() {
                    assert!(self.waiting.is_empty() && self.residents.is_empty(), "nothing more can happen");
                    return;
                }
                now = self.requests[self.sent].arrival;
                self.take_in(now);
                continue;
            };
            if self.config.async_scheduling {
                self.in_flight = true;
                while let Some(next) = self.compose(now) {
                    now += step.seconds;
                    self.deliver(&step, now);
                    step = next;
                }
                self.in_flight = false;
            }
            now += step.seconds;
            self.deliver(&step, now);
        }
    }

    /// The client sends what has arrived before now, while it may.
    fn take_in_before(&mut self, now: f64) {
        while self.may_send() && self.requests[self.sent].arrival < now {
            let arrival = self.requests[self.sent].arrival;
            self.send(arrival);
        }
    }

    /// The client sends what arrives now, and what it had to hold back until now.
    fn take_in(&mut self, now: f64) {
        while self.may_send() && self.requests[self.sent].arrival <= now {
            self.send(now);
        }
    }

    fn may_send(&self) -> bool {
        self.sent < self.requests.len() && self.inside < self.max_concurrency
    }

    fn send(&mut self, sent: f64) {
        let id = self.sent;
        self.requests[id].sent = sent;
        self.requests[id].aged = self.clock.at(self.spec.aging, sent);
        self.requests[id].mean = self.clock.mean;
        self.sent += 1;
        self.inside += 1;
        self.enqueue(id, sent);
    }

    pub(super) fn enqueue(&mut self, id: usize, since: f64) {
        self.requests[id].queued = since;
        self.requests[id].key = self.queue_key(id);
        self.waiting.push(id);
    }

    fn slots(&self) -> usize {
        self.config.decode_slots.unwrap_or(u32::MAX).min(self.config.max_num_seqs) as usize
    }

    /// Whether a resident could decode: also one whose tokens are all stored again but for the last.
    fn could(&self, id: usize) -> bool {
        let request = &self.requests[id];
        let lacks_one = request.stored >= request.prompt && request.target == request.stored + 1;
        !request.ends() && (!request.prefills() || lacks_one)
    }

    /// Who decodes in this step.
    fn decoders(&mut self) -> Vec<usize> {
        let mut ready: Vec<usize> = self.residents.iter().copied().filter(|&id| self.could(id)).collect();
        ready.sort_unstable();
        let slots = self.slots();
        let waited = |id: usize| self.requests[id].idle_steps;
        let overdue = |&id: &usize| self.spec.wait_cap_steps.is_some_and(|cap| waited(id) >= cap);
        let attained = self.spec.levers.slots && matches!(self.spec.rule, Rule::Las | Rule::Mlfq);
        let crossed =
            |&id: &usize| attained && next_level(self.requests[id].generated - 1) == self.requests[id].generated;
        let anew = std::mem::take(&mut self.choose_anew)
            || ready != self.ready
            || ready.iter().any(overdue)
            || self.decoded.iter().any(crossed);
        self.ready = ready.clone();
        if ready.len() <= slots {
            return ready;
        }
        if !anew {
            return self.decoded.clone();
        }
        let bonus = |id: usize| if self.holders.contains(&id) { self.spec.hysteresis.ln() } else { 0.0 };
        let key = |id: usize| self.slot_key(id) - bonus(id);
        let by_key = |&x: &usize, &y: &usize| key(x).total_cmp(&key(y)).then(x.cmp(&y));
        let (mut chosen, mut rest): (Vec<usize>, Vec<usize>) = ready.iter().copied().partition(overdue);
        chosen.sort_by(|&x, &y| waited(y).cmp(&waited(x)).then(x.cmp(&y)));
        let promoted = chosen.len().min(slots);
        rest.sort_by(by_key);
        chosen.extend(rest);
        chosen.truncate(slots);
        let mut by_keys = ready.clone();
        by_keys.sort_by(by_key);
        by_keys.truncate(slots);
        self.promotions += chosen.iter().filter(|id| !by_keys.contains(id)).count() as u64;
        self.choose_anew = promoted > 0;
        ready.into_iter().filter(|id| chosen.contains(id)).collect()
    }

    fn compose(&mut self, now: f64) -> Option<Step> {
        self.take_scores(now);
        let computing = matches!(self.spec.rule, Rule::Score(_)) && (0..self.sent).any(|id| self.scored_s(id) > now);
        let evicted = self.evict(now);
        let before = self.preemptions;

        let mut decoding = self.decoders();
        let could = self.ready.clone();
        if self.spec.levers.slots {
            self.arrange(&mut decoding);
        } else {
            decoding = self.residents.iter().copied().filter(|id| decoding.contains(id)).collect();
        }
        let mut served = 0;
        while let Some(&id) = decoding.get(served) {
            let tokens = self.requests[id].stored + 1;
            if self.lacks(id, tokens) <= self.pool.free() {
                self.allocate(id, tokens);
                served += 1;
                continue;
            }
            let victim = *self.residents.last().expect("a decoder can always be preempted");
            assert!(!decoding[..served].contains(&victim), "who was served stands before who is to be");
            self.preempt(victim, now);
            decoding.retain(|&id| id != victim);
        }

        // (chunk, tokens before it) and request of each prefill.
        let mut work: Vec<(u32, u32)> = Vec::new();
        let mut prefilling: Vec<usize> = Vec::new();
        for id in self.residents.clone() {
            if !self.residents.contains(&id) || !self.requests[id].prefills() || could.contains(&id) {
                continue;
            }
            let taken = decoding.len() as u32 + work.iter().map(|&(chunk, _)| chunk).sum::<u32>();
            let stored = self.requests[id].stored;
            let chunk = (self.requests[id].target - stored).min(self.config.max_num_batched_tokens - taken);
            while self.residents.contains(&id) && self.lacks(id, stored + chunk) > self.pool.free() {
                let victim = *self.residents.last().expect("a prefill can always be preempted");
                assert!(
                    !prefilling.contains(&victim),
                    "only the last request admitted can be in the middle of its prefill"
                );
                self.preempt(victim, now);
                decoding.retain(|&id| id != victim);
            }
            if self.residents.contains(&id) && chunk > 0 {
                self.allocate(id, stored + chunk);
                self.store(id, chunk);
                work.push((chunk, stored));
                prefilling.push(id);
            }
        }

        let (mut blocked, mut no_seat, mut recomputed) = (false, false, 0);
        if self.preemptions == before {
            let used = decoding.len() as u32 + work.iter().map(|&(chunk, _)| chunk).sum::<u32>();
            let mut budget = self.config.max_num_batched_tokens - used;
            while budget > 0 {
                let Some((id, _, promoted)) = self.head(now) else { break };
                let Some((chunk, hits)) = self.fits(id, budget) else {
                    no_seat = self.residents.len() >= self.config.max_num_seqs as usize;
                    blocked =
                        !no_seat && (self.config.enable_chunked_prefill || self.left(id, &self.hits(id)) <= budget);
                    break;
                };
                let cached = hits.len() as u32 * self.config.block_size;
                let shared = hits.iter().filter(|&&block| !self.pool.is_free(block)).count();
                if !self.has_room(id, shared) {
                    break;
                }
                self.requests[id].shared = shared;
                if self.requests[id].preemptions > 0 {
                    recomputed += self.left(id, &hits);
                }
                self.admit(id, chunk, hits, now);
                self.promotions += u64::from(promoted);
                self.cached_tokens += u64::from(cached);
                budget -= chunk;
                work.push((chunk, cached));
                prefilling.push(id);
            }
        }
        for id in evicted {
            self.requeue(id, now);
        }
        let used = decoding.len() as u32 + work.iter().map(|&(chunk, _)| chunk).sum::<u32>();
        let budget_left = used < self.config.max_num_batched_tokens;
        self.refused = self.head(now).map(|(id, _, _)| id).filter(|_| budget_left);
        // Whoever was preempted with its last token under way is gone when that has come.
        self.waiting.retain(|&id| !self.requests[id].ends());
        let without_slot = |id: &&usize| self.residents.contains(id) && !decoding.contains(id);
        let gated = could.iter().filter(without_slot).count();
        self.clock.step(self.spec.aging, now, self.waiting.len() + gated);
        if decoding.is_empty() && prefilling.is_empty() {
            return None;
        }

        self.waste(used, recomputed);
        self.computed_tokens += u64::from(used);
        self.recomputed_tokens += u64::from(recomputed);
        let reads: Vec<u32> = decoding.iter().map(|&id| self.requests[id].stored).collect();
        for &id in &decoding {
            self.store(id, 1);
        }
        self.decoded = decoding.clone();
        let gated = could.iter().any(|id| self.residents.contains(id) && !decoding.contains(id));
        self.holders = if gated { decoding.clone() } else { Vec::new() };
        let busy: Vec<usize> = decoding.iter().chain(&prefilling).copied().collect();
        for &id in &self.residents {
            let waits = could.contains(&id) && !busy.contains(&id);
            self.requests[id].idle_steps = if waits { self.requests[id].idle_steps + 1 } else { 0 };
        }
        let tokens: Vec<usize> = busy.into_iter().filter(|&id| !self.requests[id].prefills()).collect();
        for &id in &tokens {
            self.requests[id].generated += 1;
            self.requests[id].token_steps = (self.steps + 1, self.requests[id].token_steps.0);
        }
        self.steps += 1;
        assert!(self.steps < 100_000, "no end in sight");
        self.steps_blocked_by_memory += u64::from(blocked);
        self.steps_blocked_by_seats += u64::from(no_seat);
        self.steps_with_queue += u64::from(!self.waiting.is_empty());
        let slow = if computing { 1.0 / (1.0 - self.spec.gpu_share) } else { 1.0 };
        Some(Step { tokens, seconds: slow * seconds(&self.config.cost, &reads, &work) })
    }

    /// The end of a step: its tokens, and in order of time what else has happened by then.
    fn deliver(&mut self, step: &Step, now: f64) {
        self.take_in_before(now);
        for &id in &step.tokens {
            let request = &mut self.requests[id];
            request.delivered += 1;
            if request.delivered == 1 {
                request.first_token_s = now;
            }
            if request.delivered == request.output {
                request.finish_s = now;
                self.finished += 1;
                self.finished_tokens += f64::from(request.output);
                self.clock.finished(request.output);
                self.room.finished(request.output);
                self.inside -= 1;
                self.residents.retain(|&other| other != id);
                let blocks = std::mem::take(&mut request.blocks);
                self.pool.release(&blocks);
            }
        }
        self.take_in(now);
    }
}
