//! The waiting queue of one simulated engine: by a static key, or by response ratio, with an optional cap on the time
//! that anyone waits. Requests are named by their place in the order of arrival.

use std::collections::{BTreeMap, BTreeSet};

use crate::queue::{Head, KeyedHeap, WaitCap};

/// Who waits, and who is next.
#[derive(Debug)]
pub struct Waiting {
    order: Discipline,
    /// When each request entered the queue; NaN when it is not in it.
    since: Vec<f64>,
    len: usize,
    cap: WaitCap,
    waited_s: f64,
    /// Entries so far: of equal keys the first in is the first out.
    pushed: u64,
}

#[derive(Debug)]
enum Discipline {
    Keyed(KeyedHeap),
    /// Requests by service time; among equal ones the earliest has the highest ratio at any time.
    ResponseRatio(BTreeMap<u32, BTreeSet<u32>>),
}

impl Waiting {
    /// An empty queue for `requests` requests, by key or by response ratio.
    pub fn new(requests: usize, response_ratio: bool, wait_cap_s: Option<f64>) -> Self {
        let order = if response_ratio {
            Discipline::ResponseRatio(BTreeMap::new())
        } else {
            Discipline::Keyed(KeyedHeap::new())
        };
        Self { order, since: vec![f64::NAN; requests], len: 0, cap: WaitCap::new(wait_cap_s), waited_s: 0.0, pushed: 0 }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the order of two waiting requests can change by time alone.
    pub fn drifts(&self) -> bool {
        matches!(self.order, Discipline::ResponseRatio(_))
    }

    /// Whether `id` waits.
    pub fn contains(&self, id: u32) -> bool {
        !self.since[id as usize].is_nan()
    }

    /// Seconds waited by all requests together, up to the moments when they left the queue.
    pub fn waited_s(&self) -> f64 {
        self.waited_s
    }

    /// Adds a request with its key (by key) or its service time (by response ratio).
    pub fn push(&mut self, id: u32, key: f64, service: u32, now: f64) {
        match &mut self.order {
            Discipline::Keyed(heap) => {
                heap.push(id, key, self.pushed);
            }
            Discipline::ResponseRatio(classes) => {
                classes.entry(service).or_default().insert(id);
            }
        }
        self.cap.enter(id, now, self.pushed);
        self.pushed += 1;
        self.since[id as usize] = now;
        self.len += 1;
    }

    /// Gives a waiting request another key.
    pub fn rekey(&mut self, id: u32, key: f64) {
        if let Discipline::Keyed(heap) = &mut self.order {
            heap.rekey(id, key);
        }
    }

    /// Who is next at time `now`; `arrival_s` are the arrivals by request.
    pub fn head(&self, now: f64, arrival_s: &[f64]) -> Option<Head<u32>> {
        self.by_order(now, arrival_s).map(|first| self.cap.head(first, now))
    }

    /// Who would be next without a cap.
    fn by_order(&self, now: f64, arrival_s: &[f64]) -> Option<u32> {
        match &self.order {
            Discipline::Keyed(heap) => heap.peek().map(|(id, _)| id),
            Discipline::ResponseRatio(classes) => {
                let ratio = |id: u32, service: u32| (now - arrival_s[id as usize]) / f64::from(service);
                let first = classes.iter().filter_map(|(&service, ids)| Some((*ids.first()?, service)));
                first
                    .map(|(id, service)| (id, ratio(id, service)))
                    .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
                    .map(|(id, _)| id)
            }
        }
    }

    /// When the wait cap will next put somebody first.
    pub fn next_promotion(&self) -> Option<f64> {
        self.cap.next_promotion()
    }

    /// Takes a request out of the queue.
    pub fn remove(&mut self, id: u32, service: u32, now: f64) {
        match &mut self.order {
            Discipline::Keyed(heap) => {
                heap.remove(id);
            }
            Discipline::ResponseRatio(classes) => {
                if let Some(ids) = classes.get_mut(&service) {
                    ids.remove(&id);
                    if ids.is_empty() {
                        classes.remove(&service);
                    }
                }
            }
        }
        self.cap.leave(id);
        self.waited_s += now - self.since[id as usize];
        self.since[id as usize] = f64::NAN;
        self.len -= 1;
    }
}
