//! What the policy believes of a request, and who comes before whom.

use leap::levers::aging::Aging;
use leap::replay::Rule;

use super::Reference;

impl Reference<'_> {
    /// When another predictor's score is there; before that the running mean stands for it.
    pub(super) fn scored_s(&self, id: usize) -> f64 {
        self.requests[id].sent + self.spec.delay_s
    }

    pub(super) fn take_scores(&mut self, now: f64) {
        let Rule::Score(name) = &self.spec.rule else { return };
        let scores = self.trace.score(name).unwrap();
        for id in 0..self.sent {
            if self.requests[id].score.is_none() && self.scored_s(id) <= now {
                self.requests[id].score = Some(f64::from(scores[self.requests[id].row]));
                if self.spec.levers.queue {
                    self.requests[id].key = self.queue_key(id);
                }
                self.choose_anew |= self.spec.delay_s > 0.0;
            }
        }
    }

    pub(super) fn mean_length(&self) -> f64 {
        if self.finished > 0 { self.finished_tokens / f64::from(self.finished) } else { self.max_tokens / 4.0 }
    }

    /// Tokens still to come, as the policy believes, `generated` of them being there.
    pub(super) fn remaining(&self, id: usize) -> f64 {
        let request = &self.requests[id];
        let generated = request.generated;
        match &self.spec.rule {
            Rule::SjfPrompt => f64::from(request.prompt),
            Rule::Las => 1.0 + f64::from(generated),
            Rule::Mlfq => {
                let (mut level, mut top) = (0, 32);
                while generated >= top {
                    level += 1;
                    top *= 4;
                }
                32.0 * 4_f64.powi(level)
            }
            Rule::SjfOracle => f64::from(request.output),
            Rule::SrptOracle => (f64::from(request.output) - f64::from(generated)).max(1.0),
            Rule::Score(_) => match request.score {
                Some(score) => (score - f64::from(generated)).max(1.0),
                None => self.mean_length(),
            },
            _ => unreachable!("no remaining in this policy"),
        }
    }

    pub(super) fn queue_key(&self, id: usize) -> f64 {
        if !self.spec.levers.queue || matches!(self.spec.rule, Rule::Fcfs | Rule::Hrrn) {
            return id as f64;
        }
        self.order_key(id, self.spec.memory_weight)
    }

    pub(super) fn slot_key(&self, id: usize) -> f64 {
        if self.spec.levers.slots { self.order_key(id, self.spec.slots_memory_weight) } else { id as f64 }
    }

    pub(super) fn order_key(&self, id: usize, memory_weight: f64) -> f64 {
        let request = &self.requests[id];
        let remaining = self.remaining(id);
        let held = f64::from(request.prompt) + f64::from(request.generated) + remaining / 2.0;
        let memory = if memory_weight > 0.0 { memory_weight * held.ln() } else { 0.0 };
        let flat = |mean: f64| mean / 9.0 * (1.0 - (-9.0 * remaining / mean).exp());
        let lengths = matches!(self.spec.rule, Rule::SjfOracle | Rule::SrptOracle | Rule::Score(_));
        match (self.spec.aging, request.mean) {
            (Aging::PerWait(_), Some(mean)) if lengths => flat(mean).ln() + memory + request.aged,
            _ => remaining.ln() + memory + request.aged,
        }
    }

    /// Who is admitted next, whether it has waited past the cap, and whether only that put it first.
    pub(super) fn head(&self, now: f64) -> Option<(usize, bool, bool)> {
        let by_key = if self.spec.rule == Rule::Hrrn {
            let ratio = |id: usize| (now - self.requests[id].arrival) / f64::from(self.requests[id].prompt);
            self.waiting.iter().copied().min_by(|&x, &y| ratio(y).total_cmp(&ratio(x)).then(x.cmp(&y)))
        } else {
            let key = |id: usize| self.requests[id].key;
            // Of equal ones the first that came in.
            self.waiting.iter().copied().min_by(|&x, &y| key(x).total_cmp(&key(y)))
        };
        let overdue = |&id: &usize| self.wait_cap_s.is_some_and(|cap| now - self.requests[id].queued >= cap);
        let queued = |id: usize| self.requests[id].queued;
        let waiting = self.waiting.iter().copied();
        let oldest = waiting.filter(overdue).min_by(|&x, &y| queued(x).total_cmp(&queued(y)));
        match oldest {
            Some(id) => Some((id, true, by_key != Some(id))),
            None => by_key.map(|id| (id, false, false)),
        }
    }
}
