//! The sequences that decode, kept so that any number of equal steps costs what changes in them: who finishes is a
//! heap by step, who needs a KV block is a bucket by step modulo block size, what is read is one sum.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const NOWHERE: u64 = 0;

/// The decoding sequences of one engine. Steps are counted from 1.
#[derive(Debug)]
pub struct DecodeSet {
    step: u64,
    len: u32,
    kv_tokens: u64,
    buckets: Vec<Vec<u32>>,
    place: Vec<u32>,
    joined: Vec<u64>,
    /// Step in which a sequence generates its last token; `NOWHERE` when it does not decode.
    end: Vec<u64>,
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    phase: Vec<u32>,
}

impl DecodeSet {
    /// An empty set for `requests` requests and blocks of `block_size` tokens.
    pub fn new(requests: usize, block_size: u32) -> Self {
        Self {
            step: 0,
            len: 0,
            kv_tokens: 0,
            buckets: vec![Vec::new(); block_size as usize],
            place: vec![0; requests],
            joined: vec![0; requests],
            end: vec![NOWHERE; requests],
            ends: BinaryHeap::new(),
            phase: vec![0; requests],
        }
    }

    /// The last composed step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Sequences that decode.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// KV tokens that the next step reads: per sequence what is stored and the token that it adds.
    pub fn kv_tokens(&self) -> u64 {
        self.kv_tokens
    }

    /// Whether `id` decodes.
    pub fn contains(&self, id: u32) -> bool {
        self.end[id as usize] != NOWHERE
    }

    /// Tokens that `id` has generated since it joined.
    pub fn progress(&self, id: u32) -> u32 {
        if self.contains(id) { (self.step - self.joined[id as usize]) as u32 } else { 0 }
    }

    /// Lets `id`, with `computed` tokens stored and `left` tokens to generate, decode from the next step on.
    pub fn join(&mut self, id: u32, computed: u32, left: u32) {
        let i = id as usize;
        let size = self.buckets.len() as u64;
        // The first step at or after the next one in which the stored tokens are a whole number of blocks.
        let phase = (self.step + 1 + size - u64::from(computed) % size) % size;
        let bucket = &mut self.buckets[phase as usize];
        self.phase[i] = phase as u32;
        self.place[i] = bucket.len() as u32;
        bucket.push(id);
        self.joined[i] = self.step;
        self.end[i] = self.step + u64::from(left);
        self.ends.push(Reverse((self.end[i], id)));
        self.kv_tokens += u64::from(computed) + 1;
        self.len += 1;
    }

    /// Takes `id`, with `computed` tokens stored now, out of the set.
    pub fn leave(&mut self, id: u32, computed: u32) {
        let i = id as usize;
        let bucket = &mut self.buckets[self.phase[i] as usize];
        bucket.swap_remove(self.place[i] as usize);
        if let Some(&moved) = bucket.get(self.place[i] as usize) {
            self.place[moved as usize] = self.place[i];
        }
        self.end[i] = NOWHERE;
        self.kv_tokens -= u64::from(computed) + 1;
        self.len -= 1;
    }

    /// The sequences that need a block in the step `ahead` of the last one (1 is the next).
    pub fn need_block(&self, ahead: u64) -> &[u32] {
        let size = self.buckets.len() as u64;
        &self.buckets[((self.step + ahead) % size) as usize]
    }

    /// How many steps after the last one, at most `limit`, can have their blocks when `free` are free.
    pub fn steps_with_blocks(&self, free: u32, limit: u64) -> u64 {
        let size = self.buckets.len() as u64;
        let rounds = free.checked_div(self.len).map_or(limit, u64::from);
        if rounds * size >= limit {
            return limit;
        }
        let mut left = u64::from(free) - rounds * u64::from(self.len);
        let mut steps = rounds * size;
        while steps < limit {
            let need = self.need_block(steps + 1).len() as u64;
            if need > left {
                break;
            }
            left -= need;
            steps += 1;
        }
        steps
    }

    /// Steps until the next sequence generates its last token.
    pub fn steps_to_finish(&mut self) -> Option<u64> {
        while let Some(&Reverse((end, id))) = self.ends.peek() {
            if self.end[id as usize] == end {
                return Some(end - self.step);
            }
            self.ends.pop();
        }
        None
    }

    /// A sequence that has generated its last token by now, if there is one that is still in the set.
    pub fn pop_finished(&mut self) -> Option<u32> {
        if self.steps_to_finish() != Some(0) {
            return None;
        }
        self.ends.pop().map(|Reverse((_, id))| id)
    }

    /// Moves on by `steps` steps in which nobody finishes before the last.
    pub fn advance(&mut self, steps: u64) {
        self.step += steps;
        self.kv_tokens += steps * u64::from(self.len);
    }

    /// Everybody in the set.
    pub fn members(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        self.buckets.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (id, stored tokens, tokens left) of each sequence, moved on one step at a time.
    struct Plain(Vec<(u32, u32, u32)>);

    #[test]
    fn skipped_steps_equal_single_ones() {
        let start = [(0, 5, 40), (1, 16, 33), (2, 31, 100), (3, 32, 7), (4, 1, 90)];
        let mut set = DecodeSet::new(start.len(), 16);
        set.advance(11);
        for (id, computed, left) in start {
            set.join(id, computed, left);
        }
        let mut plain = Plain(start.to_vec());
        for _ in 0..200 {
            let Some(to_finish) = set.steps_to_finish() else { break };
            assert_eq!(Some(to_finish), plain.0.iter().map(|s| u64::from(s.2)).min());
            let skip = to_finish.min(9);
            for free in [0, 3, 17, 1_000] {
                let (mut left, mut steps) = (free, 0);
                let mut now: Vec<u32> = plain.0.iter().map(|s| s.1).collect();
                while steps < 30 {
                    let need = now.iter().filter(|&&computed| computed % 16 == 0).count() as u32;
                    if need > left {
                        break;
                    }
                    left -= need;
                    steps += 1;
                    now.iter_mut().for_each(|computed| *computed += 1);
                }
                assert_eq!(set.steps_with_blocks(free, 30), steps);
            }
            set.advance(skip);
            for sequence in &mut plain.0 {
                sequence.1 += skip as u32;
                sequence.2 -= skip as u32;
            }
            for &(id, computed, left) in &plain.0 {
                if left == 0 {
                    set.leave(id, computed);
                }
            }
            plain.0.retain(|s| s.2 > 0);
            assert_eq!(set.len() as usize, plain.0.len());
            assert_eq!(set.kv_tokens(), plain.0.iter().map(|s| u64::from(s.1) + 1).sum::<u64>());
            let mut members: Vec<u32> = set.members().collect();
            members.sort_unstable();
            assert_eq!(members, plain.0.iter().map(|s| s.0).collect::<Vec<_>>());
        }
        assert_eq!(set.len(), 0);
    }
}
