//! The cap on the time that anyone waits in a queue, whatever the queue goes by otherwise.

use super::KeyedHeap;

/// The request that is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head<Id> {
    /// The request.
    pub id: Id,
    /// Whether it has waited for the cap.
    pub overdue: bool,
    /// Whether the cap put it before another one.
    pub promoted: bool,
}

/// How urgent a request is: those that have waited for the cap go first, by the time since which they wait, the others by
/// their key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Urgency {
    /// Whether it has waited for the cap.
    pub overdue: bool,
    /// Since when it waits, where it is overdue, else its key: the smallest goes first.
    pub at: f64,
}

/// Since when requests have waited, where that is capped: once the oldest has waited for the cap it is next. Counted
/// from the entry into the queue, so a request that was preempted waits anew.
#[derive(Clone, Debug)]
pub struct WaitCap {
    cap_s: Option<f64>,
    by_entry: KeyedHeap,
}

impl WaitCap {
    /// A cap of so many seconds, or none.
    pub fn new(cap_s: Option<f64>) -> Self {
        Self { cap_s, by_entry: KeyedHeap::new() }
    }

    /// `id` waits since `queued_s`; of equal times the smallest `tie` is the oldest.
    pub fn enter(&mut self, id: u32, queued_s: f64, tie: u64) {
        if self.cap_s.is_some() {
            self.by_entry.push(id, queued_s, tie);
        }
    }

    /// `id` waits no more.
    pub fn leave(&mut self, id: u32) {
        self.by_entry.remove(id);
    }

    /// Who is next at `now_s` where without the cap it would be `first`.
    pub fn head(&self, first: u32, now_s: f64) -> Head<u32> {
        match self.by_entry.peek().filter(|&(_, since)| self.reached(since, now_s)) {
            Some((id, _)) => Head { id, overdue: true, promoted: id != first },
            None => Head { id: first, overdue: false, promoted: false },
        }
    }

    /// Those who have waited for the cap at `now_s`, the oldest first.
    pub fn overdue(&self, now_s: f64) -> Vec<u32> {
        match self.by_entry.peek() {
            Some((_, since)) if self.reached(since, now_s) => {
                let by_entry = self.by_entry.sorted().into_iter();
                by_entry.take_while(|&id| self.is_overdue(id, now_s)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether `id` has waited for the cap at `now_s`.
    pub fn is_overdue(&self, id: u32, now_s: f64) -> bool {
        self.since(id).is_some_and(|since| self.reached(since, now_s))
    }

    /// Since when `id` waits, where that is capped.
    pub fn since(&self, id: u32) -> Option<f64> {
        self.by_entry.key(id)
    }

    /// How many have waited longer than `id`.
    pub fn before(&self, id: u32) -> usize {
        self.by_entry.before(id)
    }

    /// When the next of those who are not overdue at `now_s` will be.
    pub fn next_overdue(&self, now_s: f64) -> Option<f64> {
        let still = self.by_entry.iter().map(|(_, since)| since).filter(|&since| !self.reached(since, now_s));
        Some(still.min_by(f64::total_cmp)? + self.cap_s?)
    }

    fn reached(&self, since: f64, now_s: f64) -> bool {
        self.cap_s.is_some_and(|cap| now_s - since >= cap)
    }

    /// When the cap will next put somebody first.
    pub fn next_promotion(&self) -> Option<f64> {
        Some(self.by_entry.peek()?.1 + self.cap_s?)
    }
}
