//! Remaining tokens against numerical integration, and the Gittins index against its definition and textbook cases.

use leap::noise::Noise;
use leap::remaining::{
    GittinsTable, LEVELS, LengthDistribution, Objective, Order, RemainingTable, countdown, gittins_at, level_index,
    next_level, survival,
};
use proptest::prelude::*;

/// E[min(L, cap) - a | L > a] by Simpson's rule over y = sqrt(L), with the density taken relative to its largest value
/// so that far tails do not underflow.
fn integrated(m: f64, s: f64, a: f64, cap: f64) -> f64 {
    let c = a.sqrt();
    let z = (c - m) / s;
    let (low, high) = if z > 0.0 { (c, c + s * 40.0 / z.max(3.0)) } else { (c.max(m - 12.0 * s), m + 12.0 * s) };
    let peak = if z > 0.0 { z } else { 0.0 };
    let density = |y: f64| {
        let t = (y - m) / s;
        (-0.5 * (t - peak) * (t + peak)).exp()
    };
    let simpson = |from: f64, to: f64, f: &dyn Fn(f64) -> f64| {
        let n = 4000;
        let h = (to - from) / f64::from(n);
        let inner: f64 = (1..n).map(|i| f(from + f64::from(i) * h) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
        h / 3.0 * (f(from) + inner + f(to))
    };
    // The integrand has a kink at the cap, so the two sides are integrated apart.
    let kink = cap.sqrt().clamp(low, high);
    let excess = |y: f64| (y * y).min(cap) - a;
    let value = |y: f64| excess(y) * density(y);
    let top = simpson(low, kink, &value) + simpson(kink, high, &value);
    top / (simpson(low, kink, &density) + simpson(kink, high, &density))
}

#[test]
fn survival_meets_the_reference_value() {
    assert!((survival(15.0, 5.0, 200.0, f64::INFINITY) - 150.8).abs() < 0.05);
}

#[test]
fn at_the_start_survival_is_mean_plus_variance() {
    // P(sqrt(L) < 0) is 1e-23 here, so the condition L > 0 changes nothing.
    assert!((survival(50.0, 5.0, 0.0, f64::INFINITY) - 2525.0).abs() < 1e-9);
}

#[test]
fn known_length_is_a_countdown() {
    assert_eq!(survival(10.0, 0.0, 30.0, 1000.0), 70.0);
    assert_eq!(survival(10.0, 0.0, 30.0, 90.0), 60.0);
    assert_eq!(survival(10.0, 0.0, 300.0, 1000.0), 1.0);
    assert_eq!(countdown(10.0, 30.0), 70.0);
    assert_eq!(countdown(10.0, 100.0), 1.0);
}

#[test]
fn far_tail_follows_the_asymptotic_mills_ratio() {
    // E[L - a | L > a] -> 2 c s / z as z grows: Q / phi = 1 / z (1 - 1/z^2 + ...).
    let (m, s) = (5.0, 0.1);
    for c in [100.0f64, 1000.0, 30000.0] {
        let z = (c - m) / s;
        let expected = 2.0 * c * s / z;
        let got = survival(m, s, c * c, f64::INFINITY);
        assert!((got - expected.max(1.0)).abs() < 2e-3 * expected.max(1.0), "c {c}: {got} against {expected}");
    }
}

#[test]
fn nothing_is_left_at_the_cap_and_odd_inputs_stay_finite() {
    assert_eq!(survival(15.0, 5.0, 512.0, 512.0), 1.0);
    for m in [f64::NAN, f64::INFINITY, 1e300, -1e300, 0.0] {
        for s in [f64::NAN, f64::INFINITY, 1e300, 0.0, 1e-300, -1.0] {
            for cap in [4096.0, f64::INFINITY] {
                let value = survival(m, s, 100.0, cap);
                assert!(value.is_finite() && value >= 1.0 && value <= (cap - 100.0).max(1.0), "{m} {s} {cap}: {value}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn survival_equals_the_integral(m in 1.0..130.0f64, s in 0.3..40.0f64, a in 0.0..16000.0f64, room in 2.0..16000.0f64, capped: bool) {
        let cap = if capped { a + room } else { f64::INFINITY };
        let expected = integrated(m, s, a, cap).max(1.0);
        let got = survival(m, s, a, cap);
        prop_assert!((got - expected).abs() <= 1e-6 * expected, "{got} against {expected}");
    }

    #[test]
    fn survival_grows_with_the_score(m in 1.0..120.0f64, step in 0.01..5.0f64, s in 0.1..40.0f64, a in 0.0..16000.0f64) {
        let (low, high) = (survival(m, s, a, 16384.0), survival(m + step, s, a, 16384.0));
        prop_assert!(high >= low * (1.0 - 1e-9), "{low} then {high}");
    }

    #[test]
    fn levels_bracket_every_count(a in 0u32..2_000_000_000) {
        let at = level_index(a);
        prop_assert!(LEVELS[at] <= a && a < next_level(a));
        prop_assert_eq!(LEVELS.iter().copied().find(|&level| level > a), Some(next_level(a)));
    }

    #[test]
    fn index_is_the_maximum_of_its_definition(
        steps in prop::collection::vec((0.5..300.0f64, 0.01..1.0f64), 1..40),
        a in 0u32..3000,
        slack in 0.0..2000.0f64,
        ptl: bool,
    ) {
        let objective = if ptl { Objective::Ptl } else { Objective::E2el };
        let mut at = 0.5;
        let mut lengths = Vec::new();
        for (gap, _) in &steps {
            at += gap;
            lengths.push(at);
        }
        let total: f64 = steps.iter().map(|step| step.1).sum();
        let weights: Vec<f64> = steps.iter().map(|step| step.1 / total).collect();
        let cap = (at + slack).ceil();
        let distribution = LengthDistribution { lengths, weights };
        let a = f64::from(a);
        prop_assume!(distribution.lengths.iter().any(|&l| l > a));
        let expected = defined(&distribution, objective, a).max(1.0);
        let got = gittins_at(&distribution, cap, objective, a);
        prop_assert!((got - expected).abs() <= 1e-9 * expected, "{got} against {expected}");

        let table = GittinsTable::new(&distribution, cap as u32, objective);
        let level = f64::from(LEVELS[level_index(a as u32)]);
        let held = defined(&distribution, objective, level).max(1.0);
        prop_assert!((table.remaining(a as u32) - held).abs() <= 1e-6 * held);
        let mean = mean_excess(&distribution, level).max(1.0);
        prop_assert!((table.mean_remaining(a as u32) - mean).abs() <= 1e-6 * mean);
    }
}

fn mean_excess(distribution: &LengthDistribution, a: f64) -> f64 {
    let left = || distribution.lengths.iter().zip(&distribution.weights).filter(|(l, _)| **l > a);
    left().map(|(l, w)| (l - a) * w).sum::<f64>() / left().map(|(_, w)| w).sum::<f64>()
}

/// 1 / index by trying every D at which a completion can happen, as the definition reads.
fn defined(distribution: &LengthDistribution, objective: Objective, a: f64) -> f64 {
    let left: Vec<(f64, f64)> = distribution
        .lengths
        .iter()
        .copied()
        .zip(distribution.weights.iter().copied())
        .filter(|(l, _)| *l > a)
        .collect();
    let ratio = |d: f64| {
        let done = left.iter().filter(|(l, _)| *l <= a + d * (1.0 + 1e-12));
        let worth: f64 = done
            .map(|(l, w)| match objective {
                Objective::E2el => *w,
                Objective::Ptl => w / l,
            })
            .sum();
        worth / left.iter().map(|(l, w)| (l - a).min(d) * w).sum::<f64>()
    };
    1.0 / left.iter().map(|(l, _)| ratio(l - a)).fold(0.0, f64::max)
}

#[test]
fn geometric_length_has_a_constant_index() {
    // Without memory the hazard is p wherever the request stands; a cap of 20 means leaves 2e-9 of it.
    let p = 0.005;
    let cap = 4000u32;
    let lengths: Vec<f64> = (1..=cap).map(f64::from).collect();
    let mut weights: Vec<f64> = (0..cap).map(|k| p * (1.0f64 - p).powi(k as i32)).collect();
    weights[cap as usize - 1] = (1.0f64 - p).powi(cap as i32 - 1);
    let table = GittinsTable::new(&LengthDistribution { lengths, weights }, cap, Objective::E2el);
    for a in [0, 8, 45, 200, 724, 1448] {
        assert!((table.remaining(a) - 1.0 / p).abs() < 0.01, "a {a}: {}", table.remaining(a));
    }
}

#[test]
fn known_length_leaves_length_less_generated() {
    let table = GittinsTable::new(&LengthDistribution::point(300.0), 4096, Objective::E2el);
    for level in LEVELS.iter().copied().filter(|&level| level < 300) {
        assert_eq!(table.remaining(level), 300.0 - f64::from(level));
        assert_eq!(table.mean_remaining(level), 300.0 - f64::from(level));
    }
    let table = GittinsTable::new(&LengthDistribution::point(300.0), 4096, Objective::Ptl);
    assert_eq!(table.remaining(64), 300.0 * 236.0);
}

#[test]
fn past_the_support_the_cap_is_what_is_left() {
    let table = GittinsTable::new(&LengthDistribution::point(100.0), 1000, Objective::E2el);
    assert_eq!(table.remaining(128), 872.0);
    assert_eq!(table.remaining(999), 1000.0 - 724.0);
    assert_eq!((table.remaining(1000), table.mean_remaining(5000)), (1.0, 1.0));
    let table = GittinsTable::new(&LengthDistribution::point(100.0), 1000, Objective::Ptl);
    assert_eq!(table.remaining(128), 872.0 * 1000.0);
    // A length above the cap ends at the cap.
    let table = GittinsTable::new(&LengthDistribution::point(5000.0), 1000, Objective::E2el);
    assert_eq!(table.remaining(0), 1000.0);
}

#[test]
fn levels_are_half_octaves_from_eight() {
    assert_eq!(LEVELS[..9], [0, 8, 11, 16, 23, 32, 45, 64, 91]);
    assert_eq!((next_level(0), next_level(8), next_level(15), next_level(16384)), (8, 11, 16, 23170));
    for (i, &level) in LEVELS.iter().enumerate().skip(1) {
        assert_eq!(f64::from(level), (8.0 * 2f64.powf((i as f64 - 1.0) / 2.0)).round());
    }
    assert_eq!(next_level(u32::MAX), u32::MAX);
}

#[test]
fn names_are_read_and_others_refused() {
    assert_eq!("gittins".parse::<Order>().unwrap(), Order::Gittins);
    assert_eq!("e2el".parse::<Objective>().unwrap(), Objective::E2el);
    assert!("srpt".parse::<Order>().unwrap_err().to_string().contains("srpt"));
    assert!("PTL".parse::<Objective>().unwrap_err().to_string().contains("PTL"));
}

#[test]
fn a_table_holds_what_each_order_says() {
    let mut noise = Noise::new(1024);
    (0..200).for_each(|i| noise.observe(12.0, f64::from(i % 7) - 3.0, 0.0));
    let (score, cap) = (12.5f32, 700);
    let m = f64::from(score);
    for objective in [Objective::Ptl, Objective::E2el] {
        let table = |order| RemainingTable::new(order, objective, score, &noise, cap);
        let gittins = GittinsTable::new(&noise.distribution(m, cap), cap, objective);
        for a in [0, 7, 8, 100, 156, 157, 699, 700, 5000] {
            let real = f64::from(a);
            assert_eq!(table(Order::Countdown).remaining(a), countdown(m, real));
            let sigma = f64::from(noise.sigma(m) as f32);
            assert_eq!(table(Order::Survival).remaining(a), survival(m, sigma, real, f64::from(cap)));
            assert_eq!(table(Order::Survival).mean_remaining(a), table(Order::Survival).remaining(a));
            assert_eq!(table(Order::Gittins).remaining(a), gittins.remaining(a));
            let room = f64::from(cap.saturating_sub(a).max(1));
            assert_eq!(table(Order::Gittins).mean_remaining(a), gittins.mean_remaining(a).min(room));
        }
        assert_eq!(table(Order::Gittins).next_rekey(100), next_level(100));
        assert_eq!(table(Order::Gittins).next_rekey(cap), u32::MAX);
    }
}

#[test]
fn a_known_length_orders_by_what_is_left_of_it() {
    let table = |order, objective| RemainingTable::of_length(order, objective, 300);
    for a in [0, 8, 128, 256] {
        let left = f64::from(300 - a);
        assert!((table(Order::Countdown, Objective::E2el).remaining(a) - left).abs() < 1e-3);
        assert!((table(Order::Survival, Objective::E2el).remaining(a) - left).abs() < 1e-3);
        // 1 / index = (L - a) / w, with w = 1 or 1 / L.
        assert!((table(Order::Gittins, Objective::E2el).remaining(a) / left - 1.0).abs() < 1e-6);
        assert!((table(Order::Gittins, Objective::Ptl).remaining(a) / (300.0 * left) - 1.0).abs() < 1e-6);
    }
}

/// What a server gives a request that names no limit is the rest of the context, and says nothing of its length.
#[test]
fn a_limit_above_the_budget_is_the_budget() {
    let noise = Noise::new(1024);
    for order in [Order::Countdown, Order::Survival, Order::Gittins] {
        let table = |cap| RemainingTable::new(order, Objective::Ptl, 12.0, &noise, cap);
        let (own, rest) = (table(1024), table(32_768));
        assert_eq!(rest.cap(), 1024);
        for a in [0, 1, 64, 512, 1023, 1024, 5000] {
            assert_eq!(rest.remaining(a), own.remaining(a), "{order:?} after {a}");
            assert_eq!(rest.mean_remaining(a), own.mean_remaining(a), "{order:?} after {a}");
            assert!((1.0..=f64::from(1024u32.saturating_sub(a).max(1))).contains(&rest.mean_remaining(a)));
        }
        assert_eq!(table(100).cap(), 100);
    }
}
