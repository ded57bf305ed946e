//! What is written down of an engine while it runs, where somebody wants to know: what it holds over time, and its steps
//! one by one.

use super::cost::Ramp;
use super::engine::Engine;
use super::state::Step;
use super::timeline::Level;

impl Engine<'_> {
    /// Takes down what is held from `at_s` on, with `free` KV blocks.
    pub(super) fn note(&mut self, at_s: f64, free: u32) {
        if let Some(recorder) = &mut self.written.recorder {
            let blocks = i64::from(self.config.usable_blocks()) - i64::from(free);
            let level =
                Level { waiting: self.waiting.len() as i64, resident: self.seats.residents.len() as i64, blocks };
            recorder.note(at_s, level);
        }
    }

    /// Takes down the blocks that each of `more` equal steps behind the last composed one takes when it is composed.
    pub(super) fn note_equal_steps(&mut self, start: f64, ramp: &Ramp, more: u64) {
        if self.written.recorder.is_none() {
            return;
        }
        let mut free = self.kv.pool.free();
        for ahead in 1..=more {
            free -= self.decoding.need_block(ahead).len() as u32;
            self.note(self.composed_s(start, ramp, ahead), free);
        }
    }

    /// Writes down the composed step and the equal ones behind it.
    pub(super) fn log_steps(&mut self, step: &Step, start: f64, ramp: &Ramp, more: u64) {
        let Some(mut log) = self.written.log.take() else { return };
        log.step(self.now, &step.scheduled);
        for ahead in 1..=more {
            log.step(self.composed_s(start, ramp, ahead), &step.scheduled);
        }
        self.written.log = Some(log);
    }

    /// When the step `ahead` of one that starts at `start` is composed.
    fn composed_s(&self, start: f64, ramp: &Ramp, ahead: u64) -> f64 {
        start + ramp.elapsed(if self.config.async_scheduling { ahead - 1 } else { ahead })
    }
}
