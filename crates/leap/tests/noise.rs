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
    for score in [5.0, 12.0, 30.0] {
        assert_eq!(plain.sigma(score), inflated.sigma(score));
    }
}

#[test]
fn answers_that_end_at_the_budget_are_foretold_by_their_level() {
    // Two kinds of answers behind one score: half short ones, half that run to M = 1024. No residual shape that is
    // scaled by s(m) has exactly half of its mass at M.
    let mut noise = Noise::new(1024).with_forgetting(1.0);
    for i in 0..2_000 {
        let root = if i % 2 == 0 { 32.0 } else { 8.0 + f64::from(i % 5) };
        noise.observe(20.0, root - 20.0, 0.0);
    }
    let distribution = noise.distribution(20.0, 1024);
    let at_cap = distribution.weights.last().copied().unwrap();
    assert_eq!(distribution.lengths.last(), Some(&1024.0));
    assert!((at_cap - 0.5).abs() < 0.02, "{at_cap}");
}

#[test]
fn a_sharp_readout_is_not_blurred_by_its_level() {
    // Scores all over one level (15 to 18.5 of 32), each true to +-0.1: a level's lengths spread by more.
    let mut noise = Noise::new(1024).with_forgetting(1.0);
    for i in 0..4_000 {
        let score = 15.0 + 3.5 * f64::from(i % 97) / 97.0;
        noise.observe(score, if i % 2 == 0 { 0.1 } else { -0.1 }, 0.0);
    }
    let distribution = noise.distribution(15.2, 1024);
    let near: f64 = distribution
        .lengths
        .iter()
        .zip(&distribution.weights)
        .filter(|(length, _)| (length.sqrt() - 15.2).abs() < 0.5)
        .map(|(_, weight)| weight)
        .sum();
    assert!(near > 0.9, "{near}");
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
    let below = |root: f64| -> f64 {
        let inside = distribution.lengths.iter().zip(&distribution.weights).filter(|(l, _)| l.sqrt() < root);
        inside.map(|(_, w)| w).sum()
    };
    // P(Exp - 1 < z): 0 at -1.25, 1 - exp(-1) at 0, 1 - exp(-3) at 2; a normal would have 0.11, 0.5 and 0.977.
    assert!(below(60.0 - 7.5) < 0.01, "{}", below(60.0 - 7.5));
    assert!((below(60.0) - 0.632).abs() < 0.05, "{}", below(60.0));
    assert!((below(72.0) - 0.950).abs() < 0.015, "{}", below(72.0));
}

#[test]
fn what_is_not_finite_is_passed_over() {
    let mut noise = Noise::new(1024);
    for (score, residual, leverage) in
        [(f64::NAN, 1.0, 0.0), (5.0, f64::NAN, 0.0), (5.0, f64::INFINITY, 0.0), (5.0, 1.0, f64::NAN)]
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
    let negative = text.replacen("\"squares\":[0.0", "\"squares\":[-1.0", 1);
    assert_ne!(negative, text);
    assert!(serde_json::from_str::<Noise>(&negative).unwrap_err().to_string().contains("noise"));
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
