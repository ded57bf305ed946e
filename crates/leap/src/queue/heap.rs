//! An indexed heap over dense ids, for queues whose keys change while requests wait.

use std::cmp::Ordering;

const ABSENT: u32 = u32::MAX;
const ARITY: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: f64,
    tie: u64,
    id: u32,
}

impl Entry {
    fn order(&self, other: &Self) -> Ordering {
        self.key.total_cmp(&other.key).then(self.tie.cmp(&other.tie)).then(self.id.cmp(&other.id))
    }

    fn before(&self, other: &Self) -> bool {
        self.order(other).is_lt()
    }
}

/// Indexed 4-ary heap over dense ids: smallest key first, then smallest tie, then smallest id, so the order never
/// depends on history. Ids are slots of the caller (a position is kept for each id up to the largest, without hashing).
/// Every change is O(log n).
#[derive(Clone, Debug, Default)]
pub struct KeyedHeap {
    entries: Vec<Entry>,
    positions: Vec<u32>,
}

impl KeyedHeap {
    /// An empty heap.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty heap with room for ids below `n`.
    pub fn with_capacity(n: usize) -> Self {
        Self { entries: Vec::with_capacity(n), positions: Vec::with_capacity(n) }
    }

    /// Adds `id`; false, and no change, where it is in already. A NaN key sorts by `f64::total_cmp`.
    pub fn push(&mut self, id: u32, key: f64, tie: u64) -> bool {
        if self.contains(id) {
            return false;
        }
        let slot = id as usize;
        if slot >= self.positions.len() {
            self.positions.resize(slot + 1, ABSENT);
        }
        let at = self.entries.len();
        // Adding zero makes both zeros one key.
        self.entries.push(Entry { key: key + 0.0, tie, id });
        self.positions[slot] = at as u32;
        self.sift_up(at);
        true
    }

    /// Id and key that would go first.
    pub fn peek(&self) -> Option<(u32, f64)> {
        self.entries.first().map(|entry| (entry.id, entry.key))
    }

    /// Takes out the id that goes first, with its key.
    pub fn pop(&mut self) -> Option<(u32, f64)> {
        let first = self.peek()?;
        self.remove(first.0);
        Some(first)
    }

    /// Takes out `id`; false where it is not in.
    pub fn remove(&mut self, id: u32) -> bool {
        let Some(at) = self.position(id) else {
            return false;
        };
        self.entries.swap_remove(at);
        self.positions[id as usize] = ABSENT;
        if at < self.entries.len() {
            self.positions[self.entries[at].id as usize] = at as u32;
            self.settle(at);
        }
        true
    }

    /// Gives `id` a new key and keeps its tie; false where it is not in.
    pub fn rekey(&mut self, id: u32, key: f64) -> bool {
        let Some(at) = self.position(id) else {
            return false;
        };
        self.entries[at].key = key + 0.0;
        self.settle(at);
        true
    }

    /// Key of `id`, if it is in.
    pub fn key(&self, id: u32) -> Option<f64> {
        self.position(id).map(|at| self.entries[at].key)
    }

    /// Whether `id` is in.
    pub fn contains(&self, id: u32) -> bool {
        self.position(id).is_some()
    }

    /// Number of ids that are in.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is in.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes everything out and keeps the memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.positions.fill(ABSENT);
    }

    /// Ids and keys in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.entries.iter().map(|entry| (entry.id, entry.key))
    }

    /// Ids in the order in which [`KeyedHeap::pop`] would take them.
    pub fn sorted(&self) -> Vec<u32> {
        let mut entries = self.entries.clone();
        entries.sort_unstable_by(Entry::order);
        entries.into_iter().map(|entry| entry.id).collect()
    }

    /// How many would be popped before `id`; 0 where it is not in. Looks at all of them.
    pub fn before(&self, id: u32) -> usize {
        let Some(at) = self.position(id) else {
            return 0;
        };
        let own = self.entries[at];
        self.entries.iter().filter(|other| other.before(&own)).count()
    }

    /// Whether `id` would be popped before `other`; both are in.
    pub fn is_before(&self, id: u32, other: u32) -> bool {
        match (self.position(id), self.position(other)) {
            (Some(a), Some(b)) => self.entries[a].before(&self.entries[b]),
            _ => false,
        }
    }

    fn position(&self, id: u32) -> Option<usize> {
        self.positions.get(id as usize).filter(|&&at| at != ABSENT).map(|&at| at as usize)
    }

    fn settle(&mut self, at: usize) {
        if self.sift_up(at) == at {
            self.sift_down(at);
        }
    }

    fn sift_up(&mut self, mut at: usize) -> usize {
        let moving = self.entries[at];
        while at > 0 {
            let parent = (at - 1) / ARITY;
            if !moving.before(&self.entries[parent]) {
                break;
            }
            self.place(at, self.entries[parent]);
            at = parent;
        }
        self.place(at, moving);
        at
    }

    fn sift_down(&mut self, mut at: usize) {
        let moving = self.entries[at];
        loop {
            let first = at * ARITY + 1;
            let children = first..(first + ARITY).min(self.entries.len());
            let best = children.reduce(|x, y| if self.entries[y].before(&self.entries[x]) { y } else { x });
            match best {
                Some(child) if self.entries[child].before(&moving) => {
                    self.place(at, self.entries[child]);
                    at = child;
                }
                _ => break,
            }
        }
        self.place(at, moving);
    }

    fn place(&mut self, at: usize, entry: Entry) {
        self.entries[at] = entry;
        self.positions[entry.id as usize] = at as u32;
    }
}
