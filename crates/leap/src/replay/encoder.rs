//! The small encoder that reads prompts on a core of its own, one after the other in the order in which they came, while
//! their requests wait. Where prompts come faster than it reads, the oldest are skipped: those behind them have longer to
//! wait.

use std::collections::VecDeque;

/// Prompts that wait for the encoder at most.
pub const ENCODER_BACKLOG: usize = 256;

/// Seconds of one core that a prompt takes, unless a policy says otherwise.
pub(super) const ENCODER_S: f64 = 0.010;

/// One server, first come first served. It goes by the moments at which it is asked, so it never has to be woken.
#[derive(Debug)]
pub(super) struct Encoder {
    seconds: f64,
    /// When it will have read all that it has begun.
    free_s: f64,
    /// Who has been asked for and not begun, and since when.
    waiting: VecDeque<(f64, u32)>,
    /// When each that was begun is read, up to the one that is being read.
    begun: VecDeque<(f64, u32)>,
}

impl Encoder {
    /// One that takes so many seconds a prompt.
    pub(super) fn new(seconds: f64) -> Self {
        Self { seconds, free_s: 0.0, waiting: VecDeque::new(), begun: VecDeque::new() }
    }

    /// Asks for a prompt; of too many that wait the oldest is skipped.
    pub(super) fn ask(&mut self, id: u32, at_s: f64) {
        self.waiting.push_back((at_s, id));
        self.begin(at_s);
        if self.waiting.len() > ENCODER_BACKLOG {
            self.waiting.pop_front();
        }
    }

    /// Nobody wants a prompt any more: it is not read if it still waits.
    pub(super) fn forget(&mut self, id: u32, now: f64) {
        self.begin(now);
        self.waiting.retain(|&(_, other)| other != id);
    }

    /// The next prompt that has been read by now.
    pub(super) fn take(&mut self, now: f64) -> Option<u32> {
        self.begin(now);
        self.next_s().filter(|&at| at <= now)?;
        self.begun.pop_front().map(|(_, id)| id)
    }

    /// When the next prompt will have been read, once all that were read before have been taken.
    pub(super) fn next_s(&self) -> Option<f64> {
        self.begun.front().map(|&(at, _)| at)
    }

    /// Begins what it comes to until `now`.
    fn begin(&mut self, now: f64) {
        while self.free_s <= now
            && let Some((asked_s, id)) = self.waiting.pop_front()
        {
            self.free_s = self.free_s.max(asked_s) + self.seconds;
            self.begun.push_back((self.free_s, id));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Ask,
        Forget(usize),
    }

    /// Who is read and when, tick by tick.
    fn naive(events: &[(u64, Event)], ticks: u64) -> Vec<(u64, u32)> {
        let (mut asked, mut waiting, mut reading, mut read) = (0, Vec::new(), None, Vec::new());
        let mut pending = events.iter().peekable();
        let last = events.last().map_or(0, |&(at, _)| at) + ticks * (events.len() as u64 + 2);
        for now in 0..=last {
            let turn = |waiting: &mut Vec<u32>, reading: &mut Option<(u64, u32)>| {
                if reading.is_none() && !waiting.is_empty() {
                    *reading = Some((now + ticks, waiting.remove(0)));
                }
            };
            if let Some((end, id)) = reading
                && end == now
            {
                read.push((end, id));
                reading = None;
            }
            turn(&mut waiting, &mut reading);
            while let Some(&(_, event)) = pending.next_if(|&&(at, _)| at == now) {
                match event {
                    Event::Ask => {
                        waiting.push(asked);
                        asked += 1;
                    }
                    Event::Forget(id) => waiting.retain(|&other| other as usize != id),
                }
                turn(&mut waiting, &mut reading);
                let over = waiting.len().saturating_sub(ENCODER_BACKLOG);
                waiting.drain(..over);
            }
        }
        read
    }

    /// Gaps in ticks between what happens, bursts that overflow the backlog among them.
    fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
        let ask = |gap| (gap, Just(Event::Ask), 1..3_usize);
        let one = prop_oneof![
            6 => ask(0..9_u64).boxed(),
            1 => (0..9_u64, (0..40_usize).prop_map(Event::Forget), Just(1)).boxed(),
            1 => (0..9_u64, Just(Event::Ask), 200..400_usize).boxed(),
        ];
        prop::collection::vec(one, 0..40).prop_map(|all| {
            let mut now = 0;
            let mut events = Vec::new();
            for (gap, event, times) in all {
                now += gap;
                events.extend(std::iter::repeat_n((now, event), times));
            }
            events
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(20_243),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn it_reads_whom_and_when_the_naive_one_does(events in events(), ticks in 1..9_u64, looks in 1..30_u64) {
            // A tick is a power of two of a second: no rounding.
            let second = |ticks: u64| ticks as f64 / 64.0;
            let mut encoder = Encoder::new(second(ticks));
            let (mut asked, mut read) = (0, Vec::new());
            let mut take = |encoder: &mut Encoder, now: f64| {
                while let Some(at) = encoder.next_s().filter(|&at| at <= now) {
                    read.push((at, encoder.take(at).expect("it has just said so")));
                }
            };
            for &(at, event) in &events {
                match event {
                    Event::Ask => {
                        encoder.ask(asked, second(at));
                        asked += 1;
                    }
                    Event::Forget(id) => encoder.forget(id as u32, second(at)),
                }
                // It makes no difference how often somebody looks.
                if at % looks == 0 {
                    take(&mut encoder, second(at));
                }
            }
            take(&mut encoder, f64::MAX);
            prop_assert_eq!(encoder.next_s(), None);
            let expected: Vec<(f64, u32)> =
                naive(&events, ticks).into_iter().map(|(at, id)| (second(at), id)).collect();
            prop_assert_eq!(read, expected);
        }
    }

    #[test]
    fn a_burst_beyond_the_backlog_costs_the_oldest_their_turn() {
        let mut encoder = Encoder::new(1.0);
        for id in 0..ENCODER_BACKLOG as u32 + 4 {
            encoder.ask(id, 0.5);
        }
        // The first is being read when the others come; of those the first three make room.
        let read: Vec<u32> = std::iter::from_fn(|| encoder.take(1e6)).collect();
        assert_eq!(read[..3], [0, 4, 5]);
        assert_eq!(read.len(), 1 + ENCODER_BACKLOG);
    }
}
