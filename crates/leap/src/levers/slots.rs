//! Which residents decode next: the smallest keys get the decode slots, but whoever has waited past the cap goes first,
//! and who has a slot keeps it against those that are hardly better.

use super::rank_of_key;
use crate::queue::static_key;
use crate::{Error, Result};

/// The decode slots of one engine.
#[derive(Clone, Debug)]
pub struct Slots {
    slots: usize,
    wait_cap_steps: Option<u32>,
    ln_hysteresis: f64,
}

/// A resident that could decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contender {
    /// Smaller is better.
    pub key: f64,
    /// Steps since it last decoded.
    pub waited: u32,
    /// Whether it had a slot in the last step, and somebody had none.
    pub holds: bool,
}

/// Who decodes in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Indices of the contenders that decode, ascending.
    pub chosen: Vec<u32>,
    /// How many of them have waited past the cap.
    pub overdue: usize,
    /// How many of them decode only because they have.
    pub promoted: usize,
}

impl Slots {
    /// So many slots. Who has waited `wait_cap_steps` goes first; a contender takes a slot from one that has it only if
    /// it is `hysteresis` times shorter.
    pub fn new(slots: usize, wait_cap_steps: Option<u32>, hysteresis: f64) -> Self {
        Self { slots, wait_cap_steps, ln_hysteresis: hysteresis.ln() }
    }

    /// Whether so many contenders are more than there are slots.
    pub fn bind(&self, contenders: usize) -> bool {
        contenders > self.slots
    }

    /// Whether who has waited so many steps goes first.
    pub fn is_overdue(&self, waited: u32) -> bool {
        self.wait_cap_steps.is_some_and(|cap| waited >= cap)
    }

    /// Who decodes. The contenders are in the order of arrival, which decides between equal keys.
    pub fn choose(&self, contenders: &[Contender]) -> Choice {
        let key = |contender: &Contender| contender.key - if contender.holds { self.ln_hysteresis } else { 0.0 };
        let keys: Vec<f64> = contenders.iter().map(key).collect();
        let waited: Vec<u32> = contenders.iter().map(|contender| contender.waited).collect();
        let chosen = select_slots(&keys, &waited, self.slots, self.wait_cap_steps);
        let overdue = chosen.iter().filter(|&&i| self.is_overdue(waited[i as usize])).count();
        let mut promoted = 0;
        if overdue > 0 {
            let by_key = select_slots(&keys, &waited, self.slots, None);
            promoted = chosen.iter().filter(|i| by_key.binary_search(i).is_err()).count();
        }
        Choice { chosen, overdue, promoted }
    }
}

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
