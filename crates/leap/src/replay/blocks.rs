//! KV blocks with a prefix cache, as vLLM's block pool keeps them: free blocks stay in the cache until they are
//! handed out again, first those that nobody could find, then the least recently freed, so that a preempted request may
//! find its own blocks and a new one the blocks of a shared prefix.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

const NIL: u32 = u32::MAX;

/// A block as its holder remembers it. The block still has the holder's content while `generation` is the pool's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The block.
    pub block: u32,
    /// How often the block had been handed out when the holder got it.
    pub generation: u32,
}

/// The usable blocks of one engine (the null block is not among them).
#[derive(Clone, Debug)]
pub struct BlockPool {
    // The free list is doubly linked through the blocks themselves, so that a cache hit leaves its middle in O(1).
    next: Vec<u32>,
    prev: Vec<u32>,
    references: Vec<u32>,
    generation: Vec<u32>,
    hash: Vec<u64>,
    head: u32,
    tail: u32,
    free: u32,
    /// By hash, the block that was published first.
    cached: FxHashMap<u64, u32>,
    /// The block published next with the same hash.
    twin: Vec<u32>,
    gains: u64,
}

impl BlockPool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: u32) -> Self {
        let n = blocks as usize;
        Self {
            next: (0..blocks).map(|b| if b + 1 < blocks { b + 1 } else { NIL }).collect(),
            prev: (0..blocks).map(|b| if b > 0 { b - 1 } else { NIL }).collect(),
            references: vec![0; n],
            generation: vec![0; n],
            hash: vec![0; n],
            head: if blocks > 0 { 0 } else { NIL },
            tail: if blocks > 0 { blocks - 1 } else { NIL },
            free: blocks,
            cached: FxHashMap::default(),
            twin: vec![NIL; n],
            gains: 0,
        }
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// How often a block became free or findable: while this stands still, what did not fit does not fit now.
    pub fn gains(&self) -> u64 {
        self.gains
    }

    /// Hands out the block at the front of the free list; what was cached in it is gone. `None` when none is free.
    pub fn allocate(&mut self) -> Option<Held> {
        if self.head == NIL {
            return None;
        }
        let block = self.head;
        self.unlink(block);
        let b = block as usize;
        self.generation[b] += 1;
        self.references[b] = 1;
        self.forget(block);
        Some(Held { block, generation: self.generation[b] })
    }

    /// Makes a full block findable by the hash of its prefix (0 is no hash). Of several with one hash the first is found,
    /// the others after it is gone.
    pub fn publish(&mut self, held: Held, hash: u64) {
        if hash == 0 || self.hash[held.block as usize] != 0 {
            return;
        }
        self.hash[held.block as usize] = hash;
        self.gains += 1;
        match self.cached.entry(hash) {
            Entry::Vacant(entry) => {
                entry.insert(held.block);
            }
            Entry::Occupied(entry) => {
                let mut last = *entry.get();
                while self.twin[last as usize] != NIL {
                    last = self.twin[last as usize];
                }
                self.twin[last as usize] = held.block;
            }
        }
    }

    fn forget(&mut self, block: u32) {
        let hash = std::mem::take(&mut self.hash[block as usize]);
        let next = std::mem::replace(&mut self.twin[block as usize], NIL);
        let Some(&first) = self.cached.get(&hash) else { return };
        if first != block {
            let mut before = first;
            while self.twin[before as usize] != block {
                before = self.twin[before as usize];
            }
            self.twin[before as usize] = next;
        } else if next == NIL {
            self.cached.remove(&hash);
        } else {
            self.cached.insert(hash, next);
        }
    }

    /// The block that holds the prefix with this hash, if it is still cached.
    pub fn find(&self, hash: u64) -> Option<Held> {
        self.cached.get(&hash).map(|&block| Held { block, generation: self.generation[block as usize] })
    }

    /// Whether the block still has the content that its holder gave it.
    pub fn is_intact(&self, held: Held) -> bool {
        self.generation[held.block as usize] == held.generation
    }

    /// Whether nobody holds the block.
    pub fn is_free(&self, held: Held) -> bool {
        self.references[held.block as usize] == 0
    }

    /// Holders of the block.
    pub fn references(&self, held: Held) -> u32 {
        self.references[held.block as usize]
    }

    /// Takes a cached block for one more holder.
    pub fn acquire(&mut self, held: Held) {
        if self.is_free(held) {
            self.unlink(held.block);
        }
        self.references[held.block as usize] += 1;
    }

    /// Gives up one hold of the block, content intact. The last one puts it into the free list: at its end where it
    /// `is_cached`, else at its front, since nobody will ask for its content.
    pub fn release(&mut self, held: Held, is_cached: bool) {
        let b = held.block as usize;
        debug_assert!(self.references[b] > 0, "block {b} was released more often than it was taken");
        self.references[b] -= 1;
        if self.references[b] > 0 {
            return;
        }
        let (prev, next) = if is_cached { (self.tail, NIL) } else { (NIL, self.head) };
        self.prev[b] = prev;
        self.next[b] = next;
        if prev == NIL {
            self.head = held.block
        } else {
            self.next[prev as usize] = held.block
        }
        if next == NIL {
            self.tail = held.block
        } else {
            self.prev[next as usize] = held.block
        }
        self.free += 1;
        self.gains += 1;
    }

    fn unlink(&mut self, block: u32) {
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        if prev == NIL {
            self.head = next
        } else {
            self.next[prev as usize] = next
        }
        if next == NIL {
            self.tail = prev
        } else {
            self.prev[next as usize] = prev
        }
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_stays_cached_until_it_is_handed_out_again() {
        let mut pool = BlockPool::new(2);
        let a = pool.allocate().unwrap();
        pool.publish(a, 7);
        pool.release(a, true);
        assert_eq!(pool.find(7), Some(a));
        // The block that was never used is handed out first, then the cached one, whose content is lost with it.
        assert_ne!(pool.allocate().unwrap().block, a.block);
        assert!(pool.is_intact(a));
        assert_eq!(pool.allocate().unwrap().block, a.block);
        assert_eq!((pool.find(7), pool.is_intact(a), pool.allocate()), (None, false, None));
    }

    #[test]
    fn of_equal_blocks_one_is_found_as_long_as_any_is_there() {
        let mut pool = BlockPool::new(3);
        let held: Vec<Held> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        held.iter().for_each(|&block| pool.publish(block, 7));
        assert_eq!(pool.find(7), Some(held[0]));
        for (gone, found) in [(1, Some(held[0])), (0, Some(held[2])), (2, None)] {
            pool.release(held[gone], true);
            assert_eq!(pool.allocate().unwrap().block, held[gone].block);
            assert_eq!(pool.find(7), found);
        }
    }

    #[test]
    fn a_block_that_nobody_could_find_is_handed_out_before_all_others() {
        let mut pool = BlockPool::new(3);
        let held: Vec<Held> = (0..2).map(|_| pool.allocate().unwrap()).collect();
        pool.release(held[0], true);
        pool.release(held[1], false);
        let order: Vec<u32> = std::iter::from_fn(|| pool.allocate()).map(|held| held.block).collect();
        assert_eq!(order, [held[1].block, 2, held[0].block]);
    }

    #[test]
    fn shared_blocks_are_free_when_the_last_holder_lets_go() {
        let mut pool = BlockPool::new(3);
        let a = pool.allocate().unwrap();
        pool.acquire(a);
        pool.release(a, true);
        assert_eq!((pool.free(), pool.is_free(a)), (2, false));
        pool.release(a, true);
        assert_eq!((pool.free(), pool.is_free(a)), (3, true));
        pool.acquire(a);
        assert_eq!(pool.free(), 2);
    }
}
