//! Online readouts: from zero, censored labels and states on disk.

#![allow(clippy::needless_range_loop, reason = "a request is its number: its row, its length, its place in time")]

mod common;

use common::traffic::{M, fitted, from_zero, row, traffic};
use common::{Directory, relative, solve};
use leap::Error;
use leap::online::{Label, Learner, OnlineOptions, OnlineReadout, censored_mean};
use leap::readout::{Kind, Meta};
use leap::ridge::FitOptions;
use leap::rls::Precision;
use leap::rows::Row;
use leap::stats::spearman;
use ndarray::{Array1, Array2, s};

#[test]
fn from_zero_the_prediction_improves() {
    let (x, lengths) = traffic(1, 1200, 24);
    let mut online = from_zero(24, 64, 8, Precision::F32);
    let mut scores = Vec::new();
    for i in 0..1200 {
        let estimate = online.estimate(row(&x, i)).unwrap();
        scores.push((f64::from(estimate.score), estimate.known));
        if i < 63 {
            assert!(!estimate.known);
        }
        online.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
    }
    let correlation = |range: std::ops::Range<usize>| {
        let score: Vec<f64> = scores[range.clone()].iter().map(|s| s.0).collect();
        let truth: Vec<f64> = lengths[range].iter().map(|&l| f64::from(l)).collect();
        spearman(&score, &truth).unwrap()
    };
    assert!(scores[80..].iter().all(|s| s.1));
    let (early, late) = (correlation(80..200), correlation(900..1200));
    // Signal and noise as made allow a correlation of about 0.73.
    assert!(late > early && late > 0.65, "{early} {late}");
    // The noise that it found is the noise that was put in.
    let sigma = online.noise().sigma(22.0);
    assert!((3.0..5.5).contains(&sigma), "{sigma}");
}

#[test]
fn before_the_first_update_it_is_the_running_mean() {
    let (x, _) = traffic(2, 20, 3);
    let mut online = from_zero(3, 8, 5, Precision::F32);
    assert_eq!(online.estimate(row(&x, 0)).unwrap().score, 32.0);
    for (i, n) in [100, 300, 500].into_iter().enumerate() {
        online.observe(row(&x, i), Label::Exact(n)).unwrap();
    }
    let estimate = online.estimate(row(&x, 4)).unwrap();
    assert_eq!((estimate.score, estimate.known), (300f32.sqrt(), false));
    assert!(online.readout().unwrap_err().to_string().contains("of 8 rows"));
    for i in 5..11 {
        online.estimate(row(&x, i)).unwrap();
    }
    assert!(!online.warming() && !online.known());
    assert_eq!(online.waiting(), 3);
    // Labels from the warm-up are not lost.
    assert_eq!(online.observe(row(&x, 12), Label::Exact(9)).unwrap(), 0);
    assert_eq!(online.observe(row(&x, 13), Label::Exact(9)).unwrap(), 1);
    assert!(online.known());
}

#[test]
fn labels_alone_end_the_warm_up() {
    let (x, lengths) = traffic(3, 40, 3);
    let mut online = from_zero(3, 16, 8, Precision::F64);
    let updates: usize = (0..40).map(|i| online.observe(row(&x, i), Label::Exact(lengths[i])).unwrap()).sum();
    assert_eq!(updates, 5);
    // Mean and scale are those of the first 16 rows.
    let readout = online.readout().unwrap();
    for j in 0..3 {
        let column = x.slice(s![..16, j]).mapv(f64::from);
        let p = readout.parts();
        assert!((f64::from(p.mean[j]) - column.mean().unwrap()).abs() < 1e-5);
        assert!((f64::from(p.scale[j]) - column.std(0.0)).abs() < 1e-5);
    }
    // And the parameters those of one solve over all 40.
    let p = readout.parts().clone();
    let u = Array2::from_shape_fn((40, 4), |(i, j)| match j {
        3 => 1.0,
        _ => ((f64::from(x[(i, j)]) - f64::from(p.mean[j])) / f64::from(p.scale[j])).clamp(-8.0, 8.0),
    });
    let y: Array1<f64> = lengths.iter().map(|&l| f64::from(l).sqrt()).collect();
    let mut a = u.t().dot(&u);
    (0..3).for_each(|j| a[(j, j)] += 10.0);
    a[(3, 3)] += 1.0 / 100.0;
    let expected = solve(&a, &u.t().dot(&y));
    let got = online.rls().unwrap().theta();
    assert!(relative(got, expected.as_slice().unwrap()) < 1e-9);
}

#[test]
fn batches_do_not_change_the_result() {
    let (x, lengths) = traffic(4, 500, 12);
    let (readout, anchor) = fitted(&x.slice(s![..200, ..]).to_owned(), &lengths[..200]);
    let run = |batch: usize, anchor: Option<leap::rls::Anchor>| {
        let options = OnlineOptions { batch, precision: Precision::F64, ..OnlineOptions::default() };
        let mut online = OnlineReadout::new(readout.clone(), anchor, options).unwrap();
        for i in 200..500 {
            online.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
        }
        online.flush().unwrap();
        assert_eq!(online.flush().unwrap(), 0);
        online
    };
    for anchor in [None, Some(anchor)] {
        let one = run(1, anchor.clone());
        assert_eq!(one.anchored(), anchor.is_some());
        assert_eq!(one.updates(), 300);
        for batch in [7, 8, 1000] {
            let other = run(batch, anchor.clone());
            assert!(relative(one.rls().unwrap().theta(), other.rls().unwrap().theta()) < 1e-9);
            for score in [5.0, 20.0, 40.0] {
                let (a, b) = (one.noise().sigma(score), other.noise().sigma(score));
                assert!((a - b).abs() < 1e-7 * a, "{a} {b}");
            }
        }
    }
}

#[test]
fn refused_rows_change_nothing() {
    let (x, lengths) = traffic(5, 40, 6);
    let dir = Directory::new("refused");
    let (before, after) = (dir.0.join("before"), dir.0.join("after"));
    for warmup in [8, 100] {
        let mut online = from_zero(6, warmup, 4, Precision::F32);
        for i in 0..30 {
            online.estimate(row(&x, i)).unwrap();
            online.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
        }
        online.save(&before).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let bad = [0.0, 1.0, bad, 0.0, 0.0, 0.0];
            for error in [
                online.estimate(Row::F32(&bad)).unwrap_err(),
                online.observe(Row::F32(&bad), Label::Exact(5)).unwrap_err(),
            ] {
                assert!(matches!(&error, Error::Readout(text) if text.contains("column 2")), "{error}");
            }
        }
        assert!(online.observe(Row::F32(&[0.0; 5]), Label::Exact(5)).is_err());
        assert!(online.observe(row(&x, 30), Label::Exact(0)).is_err());
        online.save(&after).unwrap();
        assert_eq!(std::fs::read(&before).unwrap(), std::fs::read(&after).unwrap());
    }
}

#[test]
fn a_saved_state_continues_bit_by_bit() {
    let (x, lengths) = traffic(6, 300, 10);
    let (readout, anchor) = fitted(&x, &lengths);
    let dir = Directory::new("online");
    let (one, two) = (dir.0.join("one.safetensors"), dir.0.join("two.safetensors"));
    let options = |precision| OnlineOptions { batch: 8, forgetting: 0.999, precision };
    let starts = [
        from_zero(10, 50, 8, Precision::F32),
        from_zero(10, 200, 8, Precision::F64),
        OnlineReadout::new(readout.clone(), None, options(Precision::F32)).unwrap(),
        OnlineReadout::new(readout, Some(anchor), options(Precision::F64)).unwrap(),
    ];
    for mut online in starts {
        let step = |online: &mut OnlineReadout, i: usize| {
            let estimate = online.estimate(row(&x, i)).unwrap();
            let label = if i.is_multiple_of(9) { Label::Censored(lengths[i]) } else { Label::Exact(lengths[i]) };
            online.observe(row(&x, i), label).unwrap();
            estimate
        };
        (0..150).for_each(|i| _ = step(&mut online, i));
        online.save(&one).unwrap();
        let mut resumed = OnlineReadout::load(&one).unwrap();
        assert_eq!(resumed.anchored(), online.anchored());
        for i in 150..300 {
            assert_eq!(step(&mut online, i), step(&mut resumed, i));
        }
        online.save(&one).unwrap();
        resumed.save(&two).unwrap();
        assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
        let bytes = std::fs::read(&one).unwrap();
        std::fs::write(&two, &bytes[..bytes.len() - 1]).unwrap();
        assert!(OnlineReadout::load(&two).unwrap_err().to_string().contains("two.safetensors"));
        online.readout().unwrap().save(&two).unwrap();
        assert!(OnlineReadout::load(&two).unwrap_err().to_string().contains("leap_online_version"));
    }
}

/// E[y | y > limit] by the trapezoidal rule.
fn by_integration(score: f64, sigma: f64, limit: f64) -> f64 {
    let (steps, end) = (400_000, limit.max(score) + 12.0 * sigma);
    let h = (end - limit) / f64::from(steps);
    // Relative to the density at the limit, so that a far tail does not underflow.
    let density =
        |y: f64| ((limit - score).powi(2) / 2.0 - (y - score).powi(2) / 2.0).mul_add(1.0 / (sigma * sigma), 0.0);
    let (mut mass, mut moment) = (0.0, 0.0);
    for i in 0..=steps {
        let y = limit + f64::from(i) * h;
        let weight = density(y).exp() * if i == 0 || i == steps { 0.5 } else { 1.0 };
        mass += weight;
        moment += weight * y;
    }
    moment / mass
}

#[test]
fn censored_labels_are_the_mean_of_the_tail() {
    for score in [3.0, 15.0, 40.0] {
        for sigma in [0.5, 5.0, 20.0] {
            for limit in [1.0, 10.0, 22.0, 60.0] {
                let z: f64 = (limit - score) / sigma;
                if z < -8.0 {
                    continue;
                }
                let expected = by_integration(score, sigma, limit);
                let got = censored_mean(score, sigma, limit, 1e9);
                assert!((got - expected).abs() < 1e-6 * expected, "{score} {sigma} {limit}: {got} {expected}");
                assert!(got >= limit);
            }
        }
    }
    assert_eq!(censored_mean(15.0, 5.0, 20.0, 21.0), 21.0);
    assert_eq!(censored_mean(15.0, 5.0, -1e9, 64.0), 15.0);
    assert_eq!(censored_mean(15.0, 0.0, 20.0, 64.0), 20.0);
}

#[test]
fn a_censored_label_teaches_its_imputed_value() {
    let (x, lengths) = traffic(7, 300, 5);
    let (readout, anchor) = fitted(&x, &lengths);
    let options = OnlineOptions { batch: 1, precision: Precision::F64, ..OnlineOptions::default() };
    let start = OnlineReadout::new(readout, Some(anchor), options).unwrap();
    let learned = |row: Row, label: Label| {
        let mut online = start.clone();
        online.observe(row, label).unwrap();
        online.rls().unwrap().theta().to_vec()
    };
    let x = row(&x, 3);
    let score = f64::from(start.clone().estimate(x).unwrap().score);
    let sigma = start.noise().sigma(score);
    let y = censored_mean(score, sigma, 900f64.sqrt(), 64.0);
    // Both neighbours in whole tokens bracket the imputed length.
    let censored = learned(x, Label::Censored(900));
    let (below, above) =
        (learned(x, Label::Exact((y * y).floor() as u32)), learned(x, Label::Exact((y * y).ceil() as u32)));
    for ((c, b), a) in censored.iter().zip(&below).zip(&above) {
        assert!(*c >= b.min(*a) - 1e-6 && *c <= b.max(*a) + 1e-6);
    }
    // At the budget itself there is nothing to impute.
    assert_eq!(learned(x, Label::Censored(M)), learned(x, Label::Exact(M)));
}

#[test]
fn options_out_of_range_are_refused() {
    let make = |d, m, lam, warmup, batch, forgetting| {
        let options = OnlineOptions { batch, forgetting, ..OnlineOptions::default() };
        OnlineReadout::from_zero(d, m, lam, warmup, Kind::State, options)
    };
    assert!(make(3, 100, 1.0, 2, 1, 1.0).is_ok());
    for bad in [
        make(0, 100, 1.0, 2, 1, 1.0),
        make(3, 0, 1.0, 2, 1, 1.0),
        make(3, 100, 0.0, 2, 1, 1.0),
        make(3, 100, 1.0, 1, 1, 1.0),
        make(3, 100, 1.0, 2, 0, 1.0),
        make(3, 100, 1.0, 2, 1, 0.0),
        make(3, 100, 1.0, 2, 1, 1.1),
        make(3, 100, 1.0, 2, 1, f64::NAN),
    ] {
        assert!(matches!(bad, Err(Error::Config(_))));
    }
    assert!(Learner::start(make(3, 100, 1.0, 2, 1, 1.0).unwrap(), 0).is_err());
}

#[test]
fn features_too_large_for_the_scale_are_refused_and_change_nothing() {
    let (x, lengths) = traffic(10, 30, 3);
    let (mut plain, mut tried) = (from_zero(3, 8, 2, Precision::F64), from_zero(3, 8, 2, Precision::F64));
    for i in 0..30 {
        let huge = Row::F64(&[0.0, -1e200, 1.0]);
        if i < 8 {
            assert!(tried.estimate(huge).unwrap_err().to_string().contains("column 1"));
            assert!(tried.observe(huge, Label::Exact(5)).is_err());
        }
        for online in [&mut plain, &mut tried] {
            online.estimate(row(&x, i)).unwrap();
            online.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
        }
    }
    assert!(plain.known());
    assert_eq!(plain.readout().unwrap(), tried.readout().unwrap());
}

#[test]
fn what_would_not_fit_into_memory_is_refused_before_it_is_asked_for() {
    for d in [1 << 40, usize::MAX] {
        let options = OnlineOptions::default();
        assert!(matches!(OnlineReadout::from_zero(d, M, 1.0, 2, Kind::State, options), Err(Error::Config(_))));
        let options = FitOptions::new(M, Meta::new(Kind::State));
        assert!(matches!(leap::ridge::Moments::new(d, options), Err(Error::Config(_))));
    }
    assert!(matches!(Learner::start(from_zero(3, 8, 2, Precision::F32), usize::MAX), Err(Error::Config(_))));
}
