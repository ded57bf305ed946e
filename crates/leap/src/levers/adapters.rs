//! Which residents must be passed over because a step holds no more than so many adapters. An engine counts the
//! adapters of those it schedules, so beside residents that are gated it admits requests of further ones.

use rustc_hash::FxHashSet;

use super::rank_of_key;

/// A resident that could be part of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapted {
    /// Its adapter, if it has one.
    pub adapter: Option<u64>,
    /// Smaller is better.
    pub key: f64,
    /// Place in the order of arrival.
    pub number: u64,
    /// Steps since it last had a token, where the wait cap puts it first; 0 else.
    pub overdue: u32,
}

/// How many different adapters there are.
pub fn count(adapters: impl Iterator<Item = Option<u64>>) -> usize {
    adapters.flatten().collect::<FxHashSet<u64>>().len()
}

/// Indices of those beyond `most` adapters, in no order. The adapters of the best stay: first of those overdue, the
/// longest ahead, then by key.
pub fn beyond(residents: &[Adapted], most: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..residents.len()).collect();
    places.sort_unstable_by_key(|&i| {
        let resident = &residents[i];
        (u32::MAX - resident.overdue, rank_of_key(resident.key), resident.number)
    });
    let mut taken = FxHashSet::default();
    let mut apart = Vec::new();
    for i in places {
        let Some(adapter) = residents[i].adapter.filter(|adapter| !taken.contains(adapter)) else { continue };
        if taken.len() < most {
            taken.insert(adapter);
        } else {
            apart.push(i);
        }
    }
    apart
}
