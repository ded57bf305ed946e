//! Priority queue with aging. A key that does not change while a request waits (see [`static_key`]) lets an indexed heap
//! serve exponential aging without ever being rebuilt.

mod cap;
mod heap;

pub use cap::{Head, Urgency, WaitCap};
pub use heap::KeyedHeap;

use crate::{Error, Result};
use rustc_hash::FxHashMap;

/// ln(remaining) + memory_weight * ln(memory_tokens) + aging_rate * arrival_s: smaller goes first.
///
/// `remaining` in tokens (or 1 / Gittins index), `aging_rate` per second, `memory_tokens` the KV cache that the request
/// will hold on average (`prompt + a + E[remaining] / 2`), counted from 1 up and left out where its weight is 0. This
/// is the exponential aging S * gamma^(waited / tau) with aging_rate = -ln(gamma) / tau, written so that the time which
/// all requests share drops out.
pub fn static_key(remaining: f64, aging_rate: f64, arrival_s: f64, memory_weight: f64, memory_tokens: f64) -> f64 {
    key_of_ln(remaining.ln(), aging_rate, arrival_s, memory_weight, memory_tokens)
}

/// [`static_key`] of a request whose remaining tokens are given by their logarithm.
pub fn key_of_ln(ln_remaining: f64, aging_rate: f64, arrival_s: f64, memory_weight: f64, memory_tokens: f64) -> f64 {
    let memory = if memory_weight == 0.0 { 0.0 } else { memory_weight * memory_tokens.max(1.0).ln() };
    ln_remaining + memory + aging_rate * arrival_s
}

/// Seconds for which a request of `s1` remaining tokens can be overtaken by later ones of `s2`: ln(s1 / s2) /
/// aging_rate, 0 where s2 >= s1, infinite without aging.
///
/// Of two waiting requests the later one goes first only if it arrived less than this after the earlier one; where keys
/// hold memory terms, their difference is added to the logarithm. It holds for requests that the engine could admit:
/// not for one that waits for a LoRA slot, a grammar or remote KV.
pub fn overtake_bound(s1: f64, s2: f64, aging_rate: f64) -> f64 {
    let advantage = (s1 / s2).ln();
    if advantage > 0.0 { advantage / aging_rate } else { 0.0 }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    id: u64,
    arrival_s: f64,
    memory_tokens: f64,
}

/// Waiting requests in the order of [`static_key`]; equal keys first in, first out. Ids are the caller's own.
///
/// With a positive `aging_rate` no request is overtaken by one that arrived more than [`overtake_bound`] after it, the
/// remaining tokens being those in force when the other one is taken.
#[derive(Clone, Debug)]
pub struct AgingQueue {
    aging_rate: f64,
    memory_weight: f64,
    slots: FxHashMap<u64, u32>,
    waiting: Vec<Waiting>,
    free: Vec<u32>,
    by_key: KeyedHeap,
    cap: WaitCap,
    pushed: u64,
}

impl AgingQueue {
    /// An empty queue with `aging_rate` per second.
    ///
    /// # Errors
    /// [`Error::Config`] where the rate is negative or not finite.
    pub fn new(aging_rate: f64) -> Result<Self> {
        Ok(Self {
            aging_rate: not_negative("aging_rate", aging_rate)?,
            memory_weight: 0.0,
            slots: FxHashMap::default(),
            waiting: Vec::new(),
            free: Vec::new(),
            by_key: KeyedHeap::new(),
            cap: WaitCap::new(None),
            pushed: 0,
        })
    }

    /// The same with a weight for the memory term of [`static_key`]. For an empty queue: keys already made stay.
    ///
    /// # Errors
    /// [`Error::Config`] where the weight is negative or not finite.
    pub fn with_memory_weight(mut self, memory_weight: f64) -> Result<Self> {
        self.memory_weight = not_negative("memory_weight", memory_weight)?;
        Ok(self)
    }

    /// The same with a wait in seconds after which a request goes first in [`AgingQueue::pop_at`]; None for no cap. For
    /// an empty queue.
    ///
    /// # Errors
    /// [`Error::Config`] where the cap is negative or not finite.
    pub fn with_wait_cap_s(mut self, wait_cap_s: Option<f64>) -> Result<Self> {
        self.cap = WaitCap::new(wait_cap_s.map(|cap| not_negative("wait_cap_s", cap)).transpose()?);
        Ok(self)
    }

    /// Adds a request with `remaining` tokens to come that arrived at `arrival_s` (seconds on any one clock).
    ///
    /// # Errors
    /// [`Error::Config`] where the id is in already, `remaining` is not positive and finite or `arrival_s` not finite;
    /// the queue is unchanged.
    pub fn push(&mut self, id: u64, remaining: f64, arrival_s: f64) -> Result<()> {
        self.push_with_memory(id, remaining, arrival_s, 1.0)
    }

    /// [`AgingQueue::push`] with the KV cache in tokens that the request will hold on average.
    ///
    /// # Errors
    /// As [`AgingQueue::push`], and where `memory_tokens` is negative or not finite.
    pub fn push_with_memory(&mut self, id: u64, remaining: f64, arrival_s: f64, memory_tokens: f64) -> Result<()> {
        self.push_queued(id, remaining, arrival_s, memory_tokens, arrival_s)
    }

    /// [`AgingQueue::push_with_memory`] of a request that waits since `queued_s`, as one does that was preempted.
    ///
    /// # Errors
    /// As [`AgingQueue::push_with_memory`], and where `queued_s` is not finite.
    pub fn push_queued(
        &mut self,
        id: u64,
        remaining: f64,
        arrival_s: f64,
        memory_tokens: f64,
        queued_s: f64,
    ) -> Result<()> {
        for (name, time) in [("arrival_s", arrival_s), ("queued_s", queued_s)] {
            if !time.is_finite() {
                return Err(Error::Config(format!("request {id}: {name}: expected a finite number, got {time}")));
            }
        }
        let key = self.key_of(id, remaining, arrival_s, memory_tokens)?;
        if self.slots.contains_key(&id) {
            return Err(Error::Config(format!("request {id} is in the queue already")));
        }
        let request = Waiting { id, arrival_s, memory_tokens };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.waiting[slot as usize] = request;
                slot
            }
            None => {
                self.waiting.push(request);
                (self.waiting.len() - 1) as u32
            }
        };
        self.slots.insert(id, slot);
        self.by_key.push(slot, key, self.pushed);
        self.cap.enter(slot, queued_s, self.pushed);
        self.pushed += 1;
        Ok(())
    }

    /// Takes out the request that goes first; wait caps play no part.
    pub fn pop(&mut self) -> Option<u64> {
        let (slot, _) = self.by_key.peek()?;
        Some(self.take(slot))
    }

    /// Takes out the request that goes first at time `now_s`: the oldest, once it has waited for the wait cap, else the
    /// smallest key.
    pub fn pop_at(&mut self, now_s: f64) -> Option<u64> {
        let head = self.first_at(now_s)?;
        Some(self.take(head.id))
    }

    /// The request that [`AgingQueue::pop`] would take.
    pub fn peek(&self) -> Option<u64> {
        self.by_key.peek().map(|(slot, _)| self.waiting[slot as usize].id)
    }

    /// The request that [`AgingQueue::pop_at`] would take.
    pub fn peek_at(&self, now_s: f64) -> Option<u64> {
        self.head(now_s).map(|head| head.id)
    }

    /// [`AgingQueue::peek_at`], and whether the wait cap has a part in it.
    pub fn head(&self, now_s: f64) -> Option<Head<u64>> {
        let Head { id: slot, overdue, promoted } = self.first_at(now_s)?;
        Some(Head { id: self.waiting[slot as usize].id, overdue, promoted })
    }

    /// The requests in the order in which [`AgingQueue::pop_at`] would take one after the other at `now_s`.
    pub fn order_at(&self, now_s: f64) -> Vec<u64> {
        let overdue = self.cap.overdue(now_s);
        let by_key = self.by_key.sorted().into_iter();
        let rest = by_key.filter(|&slot| !self.cap.is_overdue(slot, now_s));
        overdue.into_iter().chain(rest).map(|slot| self.waiting[slot as usize].id).collect()
    }

    /// How many would go before `id` at `now_s`, its place in [`AgingQueue::order_at`]; None where it is not in. Looks at
    /// all that wait, and sorts nobody.
    pub fn place_at(&self, id: u64, now_s: f64) -> Option<usize> {
        let &slot = self.slots.get(&id)?;
        if self.cap.is_overdue(slot, now_s) {
            return Some(self.cap.before(slot));
        }
        let overdue = self.cap.overdue(now_s);
        // Those among them who would go before it by key as well are counted once.
        let both = overdue.iter().filter(|&&other| self.by_key.is_before(other, slot)).count();
        Some(overdue.len() + self.by_key.before(slot) - both)
    }

    /// How urgent `id` is at `now_s`, comparable between queues of one clock; None where it is not in.
    pub fn urgency_at(&self, id: u64, now_s: f64) -> Option<Urgency> {
        let &slot = self.slots.get(&id)?;
        Some(match self.cap.is_overdue(slot, now_s) {
            true => Urgency { overdue: true, at: self.cap.since(slot)? },
            false => Urgency { overdue: false, at: self.by_key.key(slot)? },
        })
    }

    /// When the next of those who are not overdue at `now_s` will be; None where nobody ever is.
    pub fn next_overdue(&self, now_s: f64) -> Option<f64> {
        self.cap.next_overdue(now_s)
    }

    /// Takes out `id`; false where it is not in.
    pub fn remove(&mut self, id: u64) -> bool {
        match self.slots.get(&id) {
            Some(&slot) => {
                self.take(slot);
                true
            }
            None => false,
        }
    }

    /// Gives `id` new remaining tokens, keeping its arrival and its place among ties; false where it is not in.
    ///
    /// # Errors
    /// [`Error::Config`] where `remaining` is not positive and finite.
    pub fn rekey(&mut self, id: u64, remaining: f64) -> Result<bool> {
        let memory_tokens = self.slots.get(&id).map_or(1.0, |&slot| self.waiting[slot as usize].memory_tokens);
        self.rekey_with_memory(id, remaining, memory_tokens)
    }

    /// [`AgingQueue::rekey`] with a new average KV cache in tokens.
    ///
    /// # Errors
    /// As [`AgingQueue::rekey`], and where `memory_tokens` is negative or not finite.
    pub fn rekey_with_memory(&mut self, id: u64, remaining: f64, memory_tokens: f64) -> Result<bool> {
        let slot = self.slots.get(&id).copied();
        let arrival_s = slot.map_or(0.0, |slot| self.waiting[slot as usize].arrival_s);
        let key = self.key_of(id, remaining, arrival_s, memory_tokens)?;
        let Some(slot) = slot else {
            return Ok(false);
        };
        self.waiting[slot as usize].memory_tokens = memory_tokens;
        Ok(self.by_key.rekey(slot, key))
    }

    /// Key of `id`, if it is in.
    pub fn key(&self, id: u64) -> Option<f64> {
        self.slots.get(&id).and_then(|&slot| self.by_key.key(slot))
    }

    /// Whether `id` is in.
    pub fn contains(&self, id: u64) -> bool {
        self.slots.contains_key(&id)
    }

    /// Number of waiting requests.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Key growth per second of arrival.
    pub fn aging_rate(&self) -> f64 {
        self.aging_rate
    }

    fn first_at(&self, now_s: f64) -> Option<Head<u32>> {
        self.by_key.peek().map(|(slot, _)| self.cap.head(slot, now_s))
    }

    fn take(&mut self, slot: u32) -> u64 {
        self.by_key.remove(slot);
        self.cap.leave(slot);
        let id = self.waiting[slot as usize].id;
        self.slots.remove(&id);
        self.free.push(slot);
        id
    }

    fn key_of(&self, id: u64, remaining: f64, arrival_s: f64, memory_tokens: f64) -> Result<f64> {
        if !(remaining.is_finite() && remaining > 0.0) {
            return Err(Error::Config(format!(
                "request {id}: remaining: expected a positive finite number, got {remaining}"
            )));
        }
        if !(memory_tokens.is_finite() && memory_tokens >= 0.0) {
            return Err(Error::Config(format!(
                "request {id}: memory_tokens: expected a finite number of at least 0, got {memory_tokens}"
            )));
        }
        Ok(static_key(remaining, self.aging_rate, arrival_s, self.memory_weight, memory_tokens))
    }
}

pub(crate) fn not_negative(name: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(Error::Config(format!("{name}: expected a finite number of at least 0, got {value}")))
    }
}
