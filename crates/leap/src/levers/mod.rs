//! What the levers decide in a step, for an engine that is simulated and for vLLM alike. They see plain numbers: keys,
//! places in the order of arrival, blocks and times. Whoever asks turns the answer into its own bookkeeping.

mod adapters;
pub mod admission;
pub mod aging;
mod curve;
mod evict;
mod lengths;
mod margin;
mod plan;
mod running;
mod slots;

pub use adapters::{Adapted, beyond};
pub use evict::{Candidate, Claim, Evictor};
pub use plan::{Active, Class, Plan, Planner, Rules};
pub use running::{Look, Part, Resident, Running, last_by_key, order};
pub use slots::{Choice, Contender, Slots, select_by_remaining, select_slots, select_slots_into};

/// What a finished length keeps of its weight with every later one: an effective memory of 2,000 lengths.
const FORGETTING: f64 = 0.9995;

/// An integer that orders as the key does, above every u32: the bits of a float order as sign and magnitude, so
/// positive ones get the sign bit and negative ones are turned over. Both zeros are one, any NaN is last.
fn rank_of_key(key: f64) -> u64 {
    if key.is_nan() {
        return u64::MAX;
    }
    let bits = (key + 0.0).to_bits();
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}
