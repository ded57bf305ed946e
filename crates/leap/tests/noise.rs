//! Noise by level: what it says before any label, what it learns, and the distributions it gives.

use leap::noise::Noise;
use leap::remaining::LengthDistribution;
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, StandardNormal, Uniform};

fn assert_valid(distribution: &LengthDistribution, cap: u32) -> Result<(), TestCaseError> {
    prop_assert_eq!(distribution.lengths.len(), distribution.weights.len());
    prop_assert!((distribution.weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    prop_assert!(distribution.weights.iter().all(|&w| w > 0.0));
    prop_assert!(distribution.lengths.windows(2).all(|pair| pair[0] < pair[1]));
    prop_assert!(distribution.lengths.iter().all(|&l| l >= 1.0 && l <= f64::from(cap)));
    prop_assert_eq!(distribution.lengths.last(), Some(&f64::from(cap)));
    prop_assert!(distribution.weights.last().is_some_and(|&w| w >= 1e-3));
    Ok(())
}

#[test]
fn without_labels_the_prior_is_a_quarter_of_the_range() {
    let noise = Noise::new(4096);
    for score in [1.0, 20.0, 64.0, 1e9, -5.0] {
        assert_eq!(noise.sigma(score), 16.0);
    }
    assert_eq!(noise.count(), 0.0);
}

#[test]
fn one_label_is_weighed_against_the_prior() {
    // M = 1024: levels 31/8 wide, prior variance 64 with weight 2. Global: (2 * 64 + 9) / 3. Level of the label, weight
    // 16 for the global value: (16 * global + 9) / 17.
    let mut noise = Noise::new(1024).with_forgetting(1.0);
    let width = 31.0 / 8.0;
    let centre = 1.0 + 2.5 * width;
    noise.observe(centre, 6.0, 3.0);
    let global: f64 = (2.0 * 64.0 + 9.0) / 3.0;
    let level = (16.0 * global + 9.0) / 17.0;
    assert!((noise.sigma(centre) - level.sqrt()).abs() < 1e-12);
    assert!((noise.sigma(centre + width) - global.sqrt()).abs() < 1e-12);
    assert!((noise.sigma(centre + 0.25 * width) - (0.75 * level + 0.25 * global).sqrt()).abs() < 1e-12);
    assert_eq!(noise.count(), 1.0);
}

#[test]
fn learns_a_deviation_that_grows_with_the_score() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let scores = Uniform::new(1.0, 64.0).unwrap();
    let truth = |m: f64| 1.0 + 0.1 * m;
    let mut noise = Noise::new(4096).with_forgetting(1.0);
    for _ in 0..20_000 {
        let m = scores.sample(&mut rng);
        let z: f64 = StandardNormal.sample(&mut rng);
        noise.observe(m, truth(m) * z, 0.0);
    }
    for m in [8.0, 20.0, 32.0, 45.0, 58.0] {
        assert!((noise.sigma(m) / truth(m) - 1.0).abs() < 0.06, "m {m}: {} against {}", noise.sigma(m), truth(m));
    }
}

#[test]
fn forgetting_follows_a_change_and_bounds_the_count() {
    let mut noise = Noise::new(1024).with_forgetting(0.99);
    for i in 0..4000 {
        let size = if i < 2000 { 10.0 } else { 2.0 };
        noise.observe(15.0, if i % 2 == 0 { size } else { -size }, 0.0);
    }
    // 2,000 labels at 0.99 leave 2e-9 of the old ones; the sum of weights is 1 / (1 - 0.99).
    assert!((noise.count() - 100.0).abs() < 1e-6);
    let global: f64 = (2.0 * 64.0 + 100.0 * 4.0) / 102.0;
    assert!((noise.sigma(15.0).powi(2) - 4.0).abs() < (global - 4.0), "{}", noise.sigma(15.0));
}

#[test]
fn leverage_deflates_a_residual() {
    let (mut plain, mut inflated) = (Noise::new(2048), Noise::new(2048));
    for i in 0..50 {
        let residual = f64::from(i % 7) - 3.0;
        plain.observe(12.0, residual, 0.0);
        inflated.observe(12.0, 2.0 * residual, 3.0);
    }
    for score in [1.0, 12.0, 13.0, 40.0] {
        assert_eq!(plain.sigma(score), inflated.sigma(score));
    }
}

#[test]
fn shape_follows_skewed_residuals() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut noise = Noise::new(16384).with_forgetting(1.0);
    for _ in 0..20_000 {
        let e: f64 = Exp1.sample(&mut rng);
        noise.observe(60.0, 6.0 * (e - 1.0), 0.0);
    }
    let distribution = noise.distribution(60.0, 16384);
    // Lengths fall into 40 geometric bins, so the distribution is known where they meet: P(6 (e - 1) + 60 < root).
    for edge in [33, 34, 35, 36] {
        let root = 128f64.powf(f64::from(edge) / 40.0);
        let expected = 1.0 - (-((root - 60.0) / 6.0 + 1.0).max(0.0)).exp();
        let inside = distribution.lengths.iter().zip(&distribution.weights).filter(|(l, _)| l.sqrt() < root);
        let below: f64 = inside.map(|(_, w)| w).sum();
        // A normal would be 0.07 off at the first of them, 0.11 at the second.
        assert!((below - expected).abs() < 0.015, "{root}: {below}, {expected}");
    }
}

#[test]
fn answers_that_end_at_the_budget_are_a_mass_there() {
    // M of every kind of rounding; 200 labels at M and 200 at M / 4, all predicted between.
    for max_tokens in [1000u32, 1024, 2048, 4097, 12_345, 65_536] {
        let (m, root) = (f64::from(max_tokens), f64::from(max_tokens).sqrt());
        let mut noise = Noise::new(max_tokens).with_forgetting(1.0);
        let centre = 1.0 + 5.5 * (root - 1.0) / 8.0;
        for i in 0..400 {
            noise.observe(centre, if i % 2 == 0 { root } else { root / 2.0 } - centre, 0.0);
        }
        let distribution = noise.distribution(centre, max_tokens);
        let last = distribution.weights.len() - 1;
        assert_eq!(distribution.lengths[last], m);
        // Half of the labels weigh 400 against 16 (1 + (width / s)^4) of the shape's, of which a part is at M too.
        let s = noise.sigma(centre);
        let prior = 16.0 * (1.0 + ((root - 1.0) / 8.0 / s).powi(4));
        let local = 400.0 / (400.0 + prior);
        let shape = LengthDistribution::normal(centre, s, max_tokens);
        assert!(distribution.weights[last] >= 0.5 * local * 0.999, "{max_tokens}");
        assert!(distribution.weights[last] <= 0.5 * local + (1.0 - local) + 1e-3, "{max_tokens}");
        assert!(shape.weights[shape.weights.len() - 1] < 0.5 * local, "the atom is not the normal's doing");
        // Below M the cap gathers both halves.
        let capped = noise.distribution(centre, max_tokens / 8);
        assert!(capped.weights[capped.weights.len() - 1] > local);
    }
}

#[test]
fn without_labels_the_shape_is_normal() {
    for (score, cap) in [(20.0, 4096), (20.0, 300), (60.0, 4096)] {
        let noise = Noise::new(4096);
        assert_eq!(noise.distribution(score, cap), LengthDistribution::normal(score, noise.sigma(score), cap));
    }
}

#[test]
fn a_level_does_not_blur_a_sharp_predictor() {
    // Scores all over M = 16,384, whose levels are 16 wide, and a deviation of 3: the root's deviation must stay near 3.
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let scores = Uniform::new(20.0, 120.0).unwrap();
    let mut noise = Noise::new(16_384);
    for _ in 0..4000 {
        let z: f64 = StandardNormal.sample(&mut rng);
        noise.observe(scores.sample(&mut rng), 3.0 * z, 0.0);
    }
    for m in [40.0, 65.0, 90.0] {
        let distribution = noise.distribution(m, 16_384);
        let pairs = || distribution.lengths.iter().zip(&distribution.weights);
        // Without the thousandth that always sits at the cap.
        let square: f64 = pairs().filter(|(l, _)| **l < 16_384.0).map(|(l, w)| w * (l.sqrt() - m).powi(2)).sum();
        assert!(square.sqrt() < 4.5, "{m}: {}", square.sqrt());
    }
}

#[test]
fn what_is_not_finite_is_passed_over() {
    let mut noise = Noise::new(1024);
    for (score, residual, leverage) in
        [(f64::NAN, 1.0, 0.0), (5.0, f64::NAN, 0.0), (5.0, f64::INFINITY, 0.0), (5.0, 1.0, f64::NAN), (5.0, 1e200, 0.0)]
    {
        noise.observe(score, residual, leverage);
    }
    assert_eq!(noise, Noise::new(1024));
}

#[test]
fn stored_noise_comes_back_and_damage_is_refused() {
    let mut noise = Noise::new(1024);
    noise.observe(5.0, 2.0, 0.1);
    noise.observe(25.0, -4.0, 0.0);
    let text = serde_json::to_string(&noise).unwrap();
    assert_eq!(serde_json::from_str::<Noise>(&text).unwrap(), noise);
    // One value at a time, everything else as it was.
    let damage = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        change(&mut value);
        let result = serde_json::from_str::<Noise>(&value.to_string());
        assert!(result.is_err(), "{value}");
    };
    for field in ["counts", "squares", "shape"] {
        damage(&|v| v[field][0] = (-1.0).into());
        damage(&|v| v[field][0] = serde_json::Value::Null);
        damage(&|v| v[field] = serde_json::json!([1.0]));
    }
    damage(&|v| v["lengths"][3][40] = (-1e-9).into());
    damage(&|v| v["lengths"][3] = serde_json::json!([0.0]));
    damage(&|v| v["lengths"] = serde_json::json!([]));
    damage(&|v| v["max_tokens"] = 0.into());
    damage(&|v| v["max_tokens"] = (-5).into());
    damage(&|v| v["forgetting"] = 0.into());
    damage(&|v| v["forgetting"] = 1.5.into());
    for field in ["max_tokens", "forgetting", "counts", "squares", "shape", "lengths"] {
        damage(&|v| _ = v.as_object_mut().map(|map| map.remove(field)));
    }
    let infinite = text.replacen("0.0", "1e999", 1);
    assert!(serde_json::from_str::<Noise>(&infinite).is_err());
}

#[test]
fn normal_distribution_keeps_mean_and_deviation_of_the_root() {
    let distribution = LengthDistribution::normal(60.0, 5.0, 1_000_000);
    let (body, _) = distribution.lengths.split_at(distribution.lengths.len() - 1);
    let mass: f64 = distribution.weights[..body.len()].iter().sum();
    let moment = |f: &dyn Fn(f64) -> f64| -> f64 {
        body.iter().zip(&distribution.weights).map(|(l, w)| f(l.sqrt()) * w).sum::<f64>() / mass
    };
    assert!((mass - 0.999).abs() < 1e-12);
    assert!((moment(&|y| y) - 60.0).abs() < 1e-9);
    assert!((moment(&|y| (y - 60.0) * (y - 60.0)) - 25.0).abs() < 1e-9);
}

#[test]
fn the_place_of_a_length_is_the_mass_below_and_up_to_it() {
    let distribution = LengthDistribution { lengths: vec![1.0, 4.0, 9.0], weights: vec![0.25, 0.25, 0.5] };
    for (length, place) in [
        (0.5, (0.0, 0.0)),
        (1.0, (0.0, 0.25)),
        (3.0, (0.25, 0.25)),
        (4.0, (0.25, 0.5)),
        (9.0, (0.5, 1.0)),
        (20.0, (1.0, 1.0)),
    ] {
        assert_eq!(distribution.pit(length), place, "{length}");
    }
    // Of a readout's noise lengths end at M, which has a mass of its own.
    let noise = Noise::new(100);
    assert_eq!(noise.pit(5.0, 1000.0), noise.pit(5.0, 100.0));
    let at_cap = noise.distribution(5.0, 100).weights.last().copied().unwrap();
    let (low, high) = noise.pit(5.0, 100.0);
    assert!((high - 1.0).abs() < 1e-12 && (high - low - at_cap).abs() < 1e-12);
}

#[test]
fn learned_distributions_are_calibrated() {
    // sqrt(L) is normal about the score and ends at sqrt(M): a tenth to a half of the lengths are at the budget.
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let scores = Uniform::new(18.0, 32.0).unwrap();
    let mut noise = Noise::new(1024);
    let mut inside = [0.0, 0.0];
    let (first, counted) = (2000, 6000);
    for i in 0..first + counted {
        let m = scores.sample(&mut rng);
        let z: f64 = StandardNormal.sample(&mut rng);
        let root = (m + 5.0 * z).clamp(1.0, 32.0);
        let (low, high) = noise.pit(m, (root * root).round());
        for (inside, level) in inside.iter_mut().zip([0.5, 0.9]).filter(|_| i >= first) {
            let (left, right) = ((1.0 - level) / 2.0, (1.0 + level) / 2.0);
            *inside += if high > low {
                (high.min(right) - low.max(left)).max(0.0) / (high - low)
            } else {
                f64::from(left <= low && low <= right)
            };
        }
        noise.observe(m, root - m, 0.0);
    }
    // The standard errors are 0.0065 and 0.004; the grid and the levels blur a little more.
    let share = inside.map(|sum| sum / f64::from(counted));
    assert!((share[0] - 0.5).abs() < 0.03 && (share[1] - 0.9).abs() < 0.02, "{share:?}");
}

proptest! {
    #[test]
    fn distributions_are_valid(
        labels in prop::collection::vec((-10.0..200.0f64, -300.0..300.0f64, 0.0..5.0f64), 0..60),
        score in -10.0..300.0f64,
        max_tokens in 1u32..40_000,
        cap in 1u32..40_000,
    ) {
        let mut noise = Noise::new(max_tokens);
        for (m, residual, leverage) in labels {
            noise.observe(m, residual, leverage);
        }
        prop_assert!(noise.sigma(score).is_finite() && noise.sigma(score) > 0.0);
        assert_valid(&noise.distribution(score, cap), cap)?;
        assert_valid(&LengthDistribution::normal(score, noise.sigma(score), cap), cap)?;
    }
}
