//! Which residents decode next: the smallest keys get the decode slots, but whoever has waited past the cap goes first.

use super::rank_of_key;
use crate::queue::static_key;
use crate::{Error, Result};

/// Indices of the residents that decode in this step, ascending.
///
/// `keys` (n): smaller goes first. `steps_waited` (n): steps since a resident last decoded; one that is missing counts
/// as 0. Residents with at least `wait_cap_steps` of them go first, the longest waiting ahead, then the smallest keys;
/// ties by index. A NaN key goes last. Time O(n).
pub fn select_slots(keys: &[f64], steps_waited: &[u32], slots: usize, wait_cap_steps: Option<u32>) -> Vec<u32> {
    let mut chosen = Vec::new();
    select_slots_into(keys, steps_waited, slots, wait_cap_steps, &mut chosen);
    chosen
}

/// [`select_slots`] into a buffer that the caller keeps.
pub fn select_slots_into(
    keys: &[f64],
    steps_waited: &[u32],
    slots: usize,
    wait_cap_steps: Option<u32>,
    chosen: &mut Vec<u32>,
) {
    let n = u32::try_from(keys.len()).unwrap_or(u32::MAX);
    chosen.clear();
    if slots >= n as usize {
        chosen.extend(0..n);
        return;
    }
    if slots == 0 {
        return;
    }
    let rank = |i: usize| match (wait_cap_steps, steps_waited.get(i).copied().unwrap_or(0)) {
        (Some(cap), waited) if waited >= cap => u64::from(u32::MAX - waited),
        _ => rank_of_key(keys[i]),
    };
    // Selecting among bare integers is several times faster than comparing residents through their indices; what the
    // boundary ties with is then filled up in index order.
    let mut ranks: Vec<u64> = (0..n as usize).map(rank).collect();
    let (before, &mut boundary, _) = ranks.select_nth_unstable(slots - 1);
    let mut ties = slots - before.iter().filter(|&&r| r < boundary).count();
    for i in 0..n {
        let r = rank(i as usize);
        if r < boundary {
            chosen.push(i);
        } else if r == boundary && ties > 0 {
            ties -= 1;
            chosen.push(i);
        }
    }
}

/// [`select_slots`] with the keys of [`static_key`] made from remaining tokens and arrival times, all of one length n.
///
/// # Errors
/// [`Error::Config`] where lengths differ, a remaining is not positive and finite, an arrival or the rate is not
/// finite, or the rate is negative; it names the first bad index.
pub fn select_by_remaining(
    remaining: &[f64],
    arrival_s: &[f64],
    steps_waited: &[u32],
    slots: usize,
    aging_rate: f64,
    wait_cap_steps: Option<u32>,
) -> Result<Vec<u32>> {
    let n = remaining.len();
    if arrival_s.len() != n || steps_waited.len() != n {
        return Err(Error::Config(format!(
            "select_slots: remaining, arrival_s and steps_waited have {n}, {} and {} values",
            arrival_s.len(),
            steps_waited.len()
        )));
    }
    if !(aging_rate.is_finite() && aging_rate >= 0.0) {
        return Err(Error::Config(format!("aging_rate: expected a finite number of at least 0, got {aging_rate}")));
    }
    let mut keys = Vec::with_capacity(n);
    for (i, (&tokens, &arrival)) in remaining.iter().zip(arrival_s).enumerate() {
        if !(tokens.is_finite() && tokens > 0.0) {
            return Err(Error::Config(format!("remaining[{i}]: expected a positive finite number, got {tokens}")));
        }
        if !arrival.is_finite() {
            return Err(Error::Config(format!("arrival_s[{i}]: expected a finite number, got {arrival}")));
        }
        keys.push(static_key(tokens, aging_rate, arrival, 0.0, 0.0));
    }
    Ok(select_slots(&keys, steps_waited, slots, wait_cap_steps))
}
