//! Two ways to the same answer, timed in turns in one run, so that the ratio holds on whatever machine this is.

// Every bench is a program of its own and uses a part of this.
#![allow(dead_code)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::Criterion;

const ROUNDS: usize = 21;
const ROUND: Duration = Duration::from_millis(8);

/// Short runs: the ratios carry the message, the absolute times are there to be compared from one change to the next.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .without_plots()
}

/// Prints how many times as fast `ours` is as `other`: the median over rounds that alternate, and the quartiles.
pub fn side_by_side<A, B>(what: &str, ours: impl FnMut() -> A, against: &str, other: impl FnMut() -> B) {
    cycles_side_by_side(what, 1, ours, against, other);
}

/// The same for calls of `ours` that are dearer every so often: a round is a whole number of `cycle` calls.
pub fn cycles_side_by_side<A, B>(
    what: &str,
    cycle: u32,
    mut ours: impl FnMut() -> A,
    against: &str,
    mut other: impl FnMut() -> B,
) {
    let repeats = (calls_a_round(&mut ours).div_ceil(cycle) * cycle, calls_a_round(&mut other));
    let mut rounds: Vec<(f64, f64)> =
        (0..ROUNDS).map(|_| (seconds(&mut ours, repeats.0), seconds(&mut other, repeats.1))).collect();
    rounds.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
    let ratio = |i: usize| rounds[i].1 / rounds[i].0;
    let (mine, theirs) = rounds[ROUNDS / 2];
    println!(
        "{what:<38} {:>6.2} x [{:.2}, {:.2}]  {:>8}, {against} {}",
        ratio(ROUNDS / 2),
        ratio(ROUNDS / 4),
        ratio(ROUNDS * 3 / 4),
        readable(mine),
        readable(theirs)
    );
}

/// Touches every byte once, in a form that the compiler turns into vector loads and additions that keep up with memory.
pub fn read(values: &[f32]) -> u32 {
    let mut sums = [0u32; 32];
    for chunk in values.as_chunks::<32>().0 {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(value.to_bits());
        }
    }
    // All of them: a sum that nobody asks for is not computed, and its cache line not read.
    sums.into_iter().fold(0, u32::wrapping_add)
}

fn calls_a_round<T>(call: &mut impl FnMut() -> T) -> u32 {
    black_box(call());
    let start = Instant::now();
    let mut calls = 0;
    while start.elapsed() < ROUND {
        black_box(call());
        calls += 1;
    }
    calls
}

fn seconds<T>(call: &mut impl FnMut() -> T, repeats: u32) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        black_box(call());
    }
    start.elapsed().as_secs_f64() / f64::from(repeats)
}

/// Seconds to three digits in their unit.
pub fn readable(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s => format!("{:.2} ms", s * 1e3),
    }
}
