//! The clock that all who wait share, and the bound on overtaking that follows from it.

use leap::levers::aging::{Aging, AgingClock, Arrival};
use leap::queue::AgingQueue;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

#[test]
fn one_standing_wait_is_worth_alpha() {
    // A request a second ends and 40 wait, for long enough that the mean knows it: a wait of 40 s.
    let mut clock = AgingClock::new(Aging::PerWait(2.0)).unwrap();
    for second in 1..600 {
        clock.finished(Some(100));
        clock.step(f64::from(second), 40);
    }
    let passed = clock.at(639.0) - clock.at(599.0);
    // Completions come once a second, and the mean over 30 s is taken right after one: a sixtieth more than one a second.
    assert!((passed - 2.0 * (1.0 + 1.0 / 60.0)).abs() < 0.01, "{passed}");
}

#[test]
fn without_a_queue_it_goes_by_the_second() {
    let mut clock = AgingClock::new(Aging::PerWait(2.0)).unwrap();
    clock.finished(None);
    clock.step(5.0, 0);
    assert_eq!(clock.at(8.0) - clock.at(5.0), 6.0);
    let plain = AgingClock::new(Aging::PerSecond(0.05)).unwrap();
    assert_eq!(plain.at(8.0), 0.05 * 8.0);
}

#[test]
fn a_rate_that_is_none_is_refused() {
    for rate in [-1.0, f64::NAN, f64::INFINITY] {
        for (aging, name) in [(Aging::PerWait(rate), "aging: "), (Aging::PerSecond(rate), "aging_rate: ")] {
            assert!(AgingClock::new(aging).unwrap_err().to_string().starts_with(name));
        }
    }
}

#[test]
fn steps_in_which_nothing_came_or_went_change_nothing() {
    let mut every = AgingClock::new(Aging::PerWait(3.0)).unwrap();
    let mut once = every.clone();
    for clock in [&mut every, &mut once] {
        clock.finished(Some(7));
        clock.step(2.0, 9);
    }
    (1..1_000).for_each(|i| every.step(2.0 + 0.013 * f64::from(i), 9));
    assert_eq!(every.at(20.0), once.at(20.0));
}

#[test]
fn the_boost_leaves_short_ones_alone_and_flattens_long_ones() {
    let mut clock = AgingClock::new(Aging::PerWait(2.0)).unwrap();
    [50, 150].into_iter().for_each(|tokens| clock.finished(Some(tokens)));
    clock.step(0.0, 0);
    let arrival = clock.arrival(0.0);
    assert!((arrival.mean_tokens - 100.0).abs() < 0.1);
    let arrival = Arrival { mean_tokens: 100.0, ..arrival };
    // 100 / 9 x (1 - exp(-9 x / 100)).
    for (remaining, boosted) in [(0.1, 0.0996), (10.0, 6.5937), (100.0, 11.1097), (10_000.0, 11.1111)] {
        let ours = clock.boosted(remaining, arrival, false);
        assert!((ours - boosted).abs() < 1e-4, "{remaining}: {ours}");
    }
    let squared = clock.boosted(100.0 * 100.0, arrival, true);
    assert!((squared - 1110.97).abs() < 0.01, "{squared}");
    // Nobody knows a mean before the first has ended.
    let unknown = AgingClock::new(Aging::PerWait(2.0)).unwrap();
    assert_eq!(unknown.boosted(123.0, unknown.arrival(0.0), true), 123.0);
    let by_the_second = AgingClock::new(Aging::PerSecond(1.0)).unwrap();
    assert_eq!(by_the_second.boosted(123.0, arrival, true), 123.0);
}

/// The mean length after steps in which these have ended.
fn mean_after(steps: &[Vec<u32>]) -> f64 {
    let mut clock = AgingClock::new(Aging::PerWait(1.0)).unwrap();
    for (second, ends) in (1..).zip(steps) {
        ends.iter().for_each(|&tokens| clock.finished(Some(tokens)));
        clock.finished(None);
        clock.step(f64::from(second), 0);
    }
    clock.arrival(f64::MAX).mean_tokens
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(12), failure_persistence: None, ..ProptestConfig::default() })]

    /// An end counts for 0.9995 of itself once for each that came in a later step, in whatever order they came in its own.
    #[test]
    fn all_ends_of_a_step_are_equally_old(
        steps in prop::collection::vec(prop::collection::vec(1..5_000_u32, 0..6), 1..20),
        by in 0..6_usize,
    ) {
        let mut sums = (0.0, 0.0);
        for (i, ends) in steps.iter().enumerate() {
            let later: usize = steps[i + 1..].iter().map(Vec::len).sum();
            let weight = 0.9995_f64.powf(later as f64);
            sums.0 += weight * ends.len() as f64;
            sums.1 += weight * ends.iter().copied().map(f64::from).sum::<f64>();
        }
        let expected = if sums.0 > 0.0 { sums.1 / sums.0 } else { f64::INFINITY };
        let mean = mean_after(&steps);
        prop_assert!(mean == expected || (mean / expected - 1.0).abs() < 1e-12, "{mean} is not {expected}");
        let turned = |ends: &Vec<u32>| {
            let mut ends = ends.clone();
            let by = by % ends.len().max(1);
            ends.rotate_left(by);
            ends
        };
        let turned: Vec<Vec<u32>> = steps.iter().map(turned).collect();
        prop_assert_eq!(mean_after(&turned), mean);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        rng_seed: RngSeed::Fixed(11),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// (seconds to the next step, requests waiting then, requests that have finished) of each step.
    #[test]
    fn nobody_is_overtaken_beyond_the_bound(
        steps in prop::collection::vec((0.001..3.0_f64, 0..200_u64, 0..20_u32), 2..60),
        first in 1.0..5_000.0_f64,
        second in 1.0..5_000.0_f64,
        alpha in 0.1..5.0_f64,
        at in 0.0..1.0_f64,
    ) {
        let mut clock = AgingClock::new(Aging::PerWait(alpha)).unwrap();
        let arrives = (at * steps.len() as f64) as usize;
        let (mut now, mut longest_wait_s) = (0.0, 1.0_f64);
        let (mut earlier, mut arrived_s) = (clock.arrival(0.0), 0.0);
        let mut per_s = 0.0_f64;
        let (mut changed_s, mut before) = (0.0, 0);
        for (i, &(gap, waiting, finished)) in steps.iter().enumerate() {
            now += gap;
            (0..finished).for_each(|_| clock.finished(None));
            clock.step(now, waiting);
            if finished > 0 || waiting != before {
                per_s = per_s * (-(now - changed_s) / 30.0_f64).exp() + f64::from(finished) / 30.0;
                (changed_s, before) = (now, waiting);
            }
            if i == arrives {
                (earlier, arrived_s) = (clock.arrival(now), now);
                longest_wait_s = 1.0;
            }
            if i >= arrives && waiting > 0 {
                let seen = 1.0 - (-changed_s / 30.0_f64).exp();
                let wait = if per_s > 0.0 { waiting as f64 * seen / per_s } else { changed_s };
                longest_wait_s = longest_wait_s.max(wait);
            }
        }
        let later = clock.arrival(now);
        let mut queue = AgingQueue::new(1.0).unwrap();
        queue.push(0, first, earlier.aged).unwrap();
        queue.push(1, second, later.aged).unwrap();
        let bound = (first / second).ln();
        if queue.pop() == Some(1) {
            prop_assert!(later.aged - earlier.aged <= bound + 1e-9, "overtaken after more than the bound in waits");
            let seconds = longest_wait_s * bound / alpha;
            prop_assert!(now - arrived_s <= seconds + 1e-6, "overtaken after {} s, {seconds} at most", now - arrived_s);
        } else {
            prop_assert!(later.aged - earlier.aged >= bound - 1e-9, "not overtaken within the bound");
        }
    }
}
