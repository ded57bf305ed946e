//! Rank statistics against brute force and values computed with scipy 1.x and numpy.

use leap::stats::{kendall_tau_b, mean, mean_ci95, pairwise_accuracy, percentile, spearman, std_pop};
use proptest::prelude::*;

/// Tau-b by all pairs: (C - D) / sqrt((C + D + Tx) (C + D + Ty)).
fn tau_by_pairs(x: &[f64], y: &[f64]) -> Option<f64> {
    let (mut balance, mut untied_x, mut untied_y) = (0.0, 0.0, 0.0);
    for i in 0..x.len() {
        for j in 0..i {
            let (dx, dy) = (x[i] - x[j], y[i] - y[j]);
            balance += if dx == 0.0 || dy == 0.0 { 0.0 } else { dx.signum() * dy.signum() };
            untied_x += f64::from(dx != 0.0);
            untied_y += f64::from(dy != 0.0);
        }
    }
    (untied_x > 0.0 && untied_y > 0.0).then(|| balance / f64::sqrt(untied_x * untied_y))
}

/// Pearson's correlation of ranks counted by comparing everybody with everybody.
fn spearman_by_pairs(x: &[f64], y: &[f64]) -> Option<f64> {
    let ranks = |v: &[f64]| -> Vec<f64> {
        let below = |a: f64| v.iter().filter(|&&b| b < a).count() as f64;
        let equal = |a: f64| v.iter().filter(|&&b| b == a).count() as f64;
        v.iter().map(|&a| below(a) + (equal(a) + 1.0) / 2.0).collect()
    };
    let (rx, ry) = (ranks(x), ranks(y));
    let n = x.len() as f64;
    let centre = |v: &[f64]| v.iter().sum::<f64>() / n;
    let (mx, my) = (centre(&rx), centre(&ry));
    let dot = |f: &dyn Fn(usize) -> f64| (0..x.len()).map(f).sum::<f64>();
    let (sxx, syy) = (dot(&|i| (rx[i] - mx).powi(2)), dot(&|i| (ry[i] - my).powi(2)));
    (sxx > 0.0 && syy > 0.0).then(|| dot(&|i| (rx[i] - mx) * (ry[i] - my)) / (sxx * syy).sqrt())
}

/// Share of pairs in the right order by looking at all of them.
fn accuracy_by_pairs(predicted: &[f64], lengths: &[f64], ratio: f64) -> Option<f64> {
    let (mut pairs, mut right) = (0.0, 0.0);
    for i in 0..lengths.len() {
        for j in 0..lengths.len() {
            if lengths[i] / lengths[j] >= ratio {
                pairs += 1.0;
                right += if predicted[i] == predicted[j] { 0.5 } else { f64::from(predicted[i] > predicted[j]) };
            }
        }
    }
    (pairs > 0.0).then(|| right / pairs)
}

fn close(a: Option<f64>, b: Option<f64>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() < 1e-12,
        (None, None) => true,
        _ => false,
    }
}

proptest! {
    #[test]
    fn correlations_equal_brute_force(pairs in prop::collection::vec((-6i8..6, -6i8..6), 2..60), spread in 1i8..7) {
        let x: Vec<f64> = pairs.iter().map(|p| f64::from(p.0 / spread)).collect();
        let y: Vec<f64> = pairs.iter().map(|p| f64::from(p.1)).collect();
        prop_assert!(close(kendall_tau_b(&x, &y), tau_by_pairs(&x, &y)));
        prop_assert!(close(spearman(&x, &y), spearman_by_pairs(&x, &y)));
    }

    #[test]
    fn pairwise_accuracy_equals_brute_force(
        pairs in prop::collection::vec((-4i8..4, 1u8..40), 2..60),
        ratio in prop::sample::select(vec![1.0 + 1e-9, 1.2, 2.0, 7.5]),
    ) {
        let predicted: Vec<f64> = pairs.iter().map(|p| f64::from(p.0)).collect();
        let lengths: Vec<f64> = pairs.iter().map(|p| f64::from(p.1)).collect();
        let found = pairwise_accuracy(&predicted, &lengths, ratio);
        prop_assert!(close(found, accuracy_by_pairs(&predicted, &lengths, ratio)));
    }

    #[test]
    fn a_permutation_and_its_reverse(values in prop::collection::hash_set(any::<i32>(), 2..50)) {
        let x: Vec<f64> = values.into_iter().map(f64::from).collect();
        let reversed: Vec<f64> = x.iter().map(|v| -v).collect();
        prop_assert_eq!((spearman(&x, &x), kendall_tau_b(&x, &x)), (Some(1.0), Some(1.0)));
        prop_assert_eq!((spearman(&x, &reversed), kendall_tau_b(&x, &reversed)), (Some(-1.0), Some(-1.0)));
    }
}

#[test]
fn correlations_equal_scipy() {
    let x = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0];
    let y = [2.0, 7.0, 1.0, 8.0, 2.0, 8.0, 1.0, 8.0, 2.0, 8.0];
    assert!(close(spearman(&x, &y), Some(0.13471506281091267)));
    assert!(close(kendall_tau_b(&x, &y), Some(0.13041013273932525)));
}

#[test]
fn undefined_correlations_are_none() {
    for f in [spearman, kendall_tau_b] {
        assert_eq!(f(&[], &[]), None);
        assert_eq!(f(&[1.0], &[2.0]), None);
        assert_eq!(f(&[1.0, 1.0, 1.0], &[1.0, 2.0, 3.0]), None);
        assert_eq!(f(&[1.0, 2.0, 3.0], &[0.0, -0.0, 0.0]), None);
        assert_eq!(f(&[1.0, 2.0], &[1.0, 2.0, 3.0]), None);
        assert_eq!(f(&[1.0, f64::NAN], &[1.0, 2.0]), None);
        assert_eq!(f(&[f64::NEG_INFINITY, 0.0, f64::INFINITY], &[1.0, 2.0, 3.0]), Some(1.0));
    }
}

#[test]
fn pairs_of_exactly_the_ratio_count_for_every_length() {
    // The lengths are 5 k and 6 k: each such pair differs by 1.2 exactly, whatever rounding makes of 1.2.
    for k in 1..2000 {
        let k = f64::from(k);
        assert_eq!(pairwise_accuracy(&[1.0, 2.0], &[5.0 * k, 6.0 * k], 1.2), Some(1.0));
        assert_eq!(pairwise_accuracy(&[1.0, 2.0], &[5.0 * k, 6.0 * k - 0.001], 1.2), None);
    }
}

#[test]
fn pairwise_accuracy_by_hand() {
    // Pairs by a factor of 2: (1, 2) right, (1, 4) tied, (2, 4) wrong; by 4 only the tie; by 5 none.
    let (predicted, lengths) = ([10.0, 20.0, 10.0], [1.0, 2.0, 4.0]);
    assert_eq!(pairwise_accuracy(&predicted, &lengths, 2.0), Some(0.5));
    assert_eq!(pairwise_accuracy(&predicted, &lengths, 4.0), Some(0.5));
    assert_eq!(pairwise_accuracy(&predicted, &lengths, 5.0), None);
    for ratio in [1.0, 0.5, -2.0, f64::NAN] {
        assert_eq!(pairwise_accuracy(&predicted, &lengths, ratio), None);
    }
    assert_eq!(pairwise_accuracy(&predicted, &[1.0, 0.0, 4.0], 2.0), None);
    assert_eq!(pairwise_accuracy(&predicted, &[1.0, f64::INFINITY, 4.0], 2.0), None);
    assert_eq!(pairwise_accuracy(&[10.0, f64::NAN, 10.0], &lengths, 2.0), None);
    assert_eq!(pairwise_accuracy(&predicted, &lengths[..2], 2.0), None);
    assert_eq!(pairwise_accuracy(&[1.0, 2.0], &[30.0, 30.0], 1.2), None);
}

#[test]
fn percentiles_equal_numpy() {
    let sorted = [298.1, 301.2, 305.7, 312.5, 320.9];
    let expected =
        [(0.0, 298.1), (1.0, 298.224), (25.0, 301.2), (50.0, 305.7), (90.0, 317.54), (99.9, 320.8664), (100.0, 320.9)];
    for (p, value) in expected {
        assert!((percentile(&sorted, p).unwrap() - value).abs() < 1e-9, "p{p}");
    }
    assert_eq!(percentile(&[], 50.0), None);
    assert_eq!(percentile(&sorted, 101.0), None);
    assert_eq!(percentile(&sorted, f64::NAN), None);
    assert_eq!(percentile(&[4.0], 99.0), Some(4.0));
    assert_eq!(percentile(&[1.0, f64::INFINITY], 0.0), Some(1.0));
    assert_eq!(percentile(&[1.0, f64::INFINITY, f64::INFINITY], 75.0), Some(f64::INFINITY));
}

#[test]
fn interval_equals_scipy() {
    let values = [312.5, 298.1, 305.7, 320.9, 301.2];
    let (centre, interval) = mean_ci95(&values);
    let (low, high) = interval.unwrap();
    assert!((centre - 307.68).abs() < 1e-9);
    assert!((low - 296.30524629748913).abs() < 1e-8 && (high - 319.05475370251077).abs() < 1e-8, "{low} {high}");
    let (low, high) = mean_ci95(&[1.0, 2.0]).1.unwrap();
    assert!((low + 4.853102368087347).abs() < 1e-8 && (high - 7.853102368087347).abs() < 1e-8, "{low} {high}");
    assert_eq!(mean_ci95(&[5.0]), (5.0, None));
    assert_eq!(mean_ci95(&[5.0, 5.0, 5.0]).1, Some((5.0, 5.0)));
    assert!(mean_ci95(&[]).0.is_nan());
}

#[test]
fn moments_equal_numpy() {
    let values = [312.5, 298.1, 305.7, 320.9, 301.2];
    assert!((std_pop(&values).unwrap() - 8.193753718534614).abs() < 1e-12);
    assert_eq!((mean(&[1.0, 2.0, 6.0]), mean(&[]), std_pop(&[])), (Some(3.0), None, None));
}
