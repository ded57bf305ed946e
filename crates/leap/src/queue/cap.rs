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
        match self.cap_s.and_then(|cap| self.by_entry.peek().filter(|&(_, since)| now_s - since >= cap)) {
            Some((id, _)) => Head { id, overdue: true, promoted: id != first },
            None => Head { id: first, overdue: false, promoted: false },
        }
    }

    /// When the cap will next put somebody first.
    pub fn next_promotion(&self) -> Option<f64> {
        Some(self.by_entry.peek()?.1 + self.cap_s?)
    }
}
