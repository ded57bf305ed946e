//! What a simulated engine holds over time, as a step function: who waits, who has a seat, how full the KV cache is.

/// An engine's state from one moment on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Level {
    pub(super) waiting: i64,
    pub(super) resident: i64,
    /// KV blocks that somebody holds.
    pub(super) blocks: i64,
}

impl Level {
    fn plus(self, other: Self) -> Self {
        Self {
            waiting: self.waiting + other.waiting,
            resident: self.resident + other.resident,
            blocks: self.blocks + other.blocks,
        }
    }

    fn minus(self, other: Self) -> Self {
        let negative = Self { waiting: -other.waiting, resident: -other.resident, blocks: -other.blocks };
        self.plus(negative)
    }
}

/// Takes an engine's state down while it runs. Kept as changes: what happens within steps that are taken in one go is
/// told in any order, and several engines add up.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorder {
    last: Level,
    changes: Vec<(f64, Level)>,
}

impl Recorder {
    pub(super) fn note(&mut self, at_s: f64, level: Level) {
        if level != self.last {
            self.changes.push((at_s, level.minus(self.last)));
            self.last = level;
        }
    }
}

/// Waiting requests, residents and KV cache in use over time: each entry holds from its time to the next one's, and
/// before the first there is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Seconds on the clock of the arrivals, ascending.
    pub at_s: Vec<f64>,
    /// Requests in the waiting queue.
    pub waiting: Vec<u32>,
    /// Requests that hold a seat.
    pub resident: Vec<u32>,
    /// Share of the usable KV blocks that somebody holds.
    pub kv_share: Vec<f64>,
}

impl Timeline {
    /// What the recorders of engines with `usable` KV blocks in all took down.
    pub(super) fn new(recorders: impl IntoIterator<Item = Recorder>, usable: u64) -> Self {
        let mut changes: Vec<_> = recorders.into_iter().flat_map(|recorder| recorder.changes).collect();
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut timeline = Self::default();
        let (mut level, mut written) = (Level::default(), Level::default());
        for moment in changes.chunk_by(|a, b| a.0 == b.0) {
            level = moment.iter().fold(level, |level, change| level.plus(change.1));
            if level != written {
                timeline.at_s.push(moment[0].0);
                timeline.waiting.push(level.waiting as u32);
                timeline.resident.push(level.resident as u32);
                timeline.kv_share.push(level.blocks as f64 / usable as f64);
                written = level;
            }
        }
        timeline
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_several_engines_add_up_in_the_order_of_time() {
        let level = |waiting, resident, blocks| Level { waiting, resident, blocks };
        let (mut a, mut b) = (Recorder::default(), Recorder::default());
        a.note(0.0, level(1, 0, 0));
        a.note(0.0, level(0, 1, 2));
        a.note(3.0, level(0, 1, 4));
        // Told later, happened earlier.
        a.note(2.0, level(1, 1, 4));
        b.note(2.0, level(0, 2, 1));
        b.note(3.0, level(0, 2, 1));
        b.note(5.0, level(0, 2, 1));
        let timeline = Timeline::new([a, b], 10);
        assert_eq!(timeline.at_s, [0.0, 2.0, 3.0]);
        assert_eq!(timeline.waiting, [0, 1, 1]);
        assert_eq!(timeline.resident, [1, 3, 3]);
        assert_eq!(timeline.kv_share, [0.2, 0.3, 0.5]);
    }
}
