//! The client in front of the engines: it sends the requests as they arrive, and holds them back beyond a number in
//! flight.

use super::input::RunInput;

/// Who sends the requests.
pub(super) struct Client<'a> {
    arrival_s: &'a [f64],
    next: usize,
    inside: usize,
    most: usize,
    /// When it last had as many in flight as it may.
    room_since_s: f64,
}

impl<'a> Client<'a> {
    pub(super) fn new(input: &'a RunInput, max_concurrency: Option<u32>) -> Self {
        let most = max_concurrency.map_or(usize::MAX, |most| most as usize);
        Self { arrival_s: &input.arrival_s, next: 0, inside: 0, most, room_since_s: 0.0 }
    }

    /// When the next request is planned, if one may be sent.
    pub(super) fn next_arrival(&self) -> Option<f64> {
        if self.inside < self.most { self.arrival_s.get(self.next).copied() } else { None }
    }

    /// The next request to be sent by `now`, and when it was.
    pub(super) fn send(&mut self, now: f64) -> Option<(u32, f64)> {
        let at = self.next_arrival().filter(|&at| at <= now)?;
        let id = self.next as u32;
        self.next += 1;
        self.inside += 1;
        // Under a concurrency limit the client may hold a request back beyond its planned arrival.
        Some((id, at.max(self.room_since_s)))
    }

    /// Whether every request has been sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.next >= self.arrival_s.len()
    }

    /// A request has finished.
    pub(super) fn finished(&mut self, at_s: f64) {
        if self.inside == self.most {
            self.room_since_s = at_s;
        }
        self.inside -= 1;
    }
}
