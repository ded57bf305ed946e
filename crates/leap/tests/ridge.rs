//! Ridge fits against the objective solved by brute force.

mod common;

use common::{correlated, gram, relative, rng, solve};
use leap::Error;
use leap::online::{OnlineOptions, OnlineReadout};
use leap::readout::{Kind, Meta, Readout, Target};
use leap::ridge::{FitOptions, Moments, fit};
use leap::rls::{Anchor, Precision, Rls};
use leap::rows::Rows;
use ndarray::{Array1, Array2, s};
use rand::RngExt;

fn data(seed: u64, n: usize, d: usize) -> (Array2<f32>, Vec<f64>) {
    let mut r = rng(seed);
    let u = correlated(&mut r, n, d);
    let x = u.slice(s![.., ..d]).mapv(|v| (3.0 * v + 5.0) as f32);
    let w: Vec<f64> = (0..d).map(|_| r.random_range(-0.4..0.4)).collect();
    let lengths = (0..n)
        .map(|i| {
            let y: f64 = 20.0 + (0..d).map(|j| w[j] * u[(i, j)]).sum::<f64>() + r.random_range(-3.0..3.0);
            y.clamp(1.0, 60.0).powi(2).round()
        })
        .collect();
    (x, lengths)
}

fn options(lam: Option<f64>) -> FitOptions {
    FitOptions { lam, ..FitOptions::new(4096, Meta::new(Kind::State)) }
}

/// Standardised rows with their 1, as the readout defines them.
fn standardised(readout: &Readout, x: &Array2<f32>) -> Array2<f64> {
    let p = readout.parts();
    Array2::from_shape_fn((x.nrows(), x.ncols() + 1), |(i, j)| match j {
        j if j == x.ncols() => 1.0,
        _ => (f64::from(x[(i, j)]) - f64::from(p.mean[j])) / f64::from(p.scale[j]),
    })
}

fn by_brute_force(u: &Array2<f64>, y: &[f64], lam: f64) -> Array1<f64> {
    let mut a = gram(u);
    let bias = a.nrows() - 1;
    (0..bias).for_each(|i| a[(i, i)] += lam);
    solve(&a, &u.t().dot(&Array1::from(y.to_vec())))
}

fn theta(readout: &Readout) -> Vec<f64> {
    let p = readout.parts();
    p.weight.iter().chain([&p.bias]).map(|&v| f64::from(v)).collect()
}

#[test]
fn a_fit_minimises_the_objective() {
    for (seed, n, d, target) in
        [(1, 200, 7, Target::Sqrt), (2, 40, 90, Target::Log), (3, 900, 300, Target::Raw), (4, 3, 1, Target::Sqrt)]
    {
        let (x, lengths) = data(seed, n, d);
        let options = FitOptions { target, folds: 2, ..options(Some(37.0)) };
        let (readout, anchor) = fit(&Rows::F32(x.view()), &lengths, &options).unwrap();
        let p = readout.parts();
        for j in 0..d {
            let column = x.column(j).mapv(f64::from);
            let (mean, deviation) = (column.mean().unwrap(), column.std(0.0));
            assert!((f64::from(p.mean[j]) - mean).abs() < 1e-6 * mean.abs());
            assert!((f64::from(p.scale[j]) - deviation).abs() < 1e-6 * deviation);
        }
        let u = standardised(&readout, &x);
        let y: Vec<f64> = lengths.iter().map(|&l| target.of(l)).collect();
        let expected = by_brute_force(&u, &y, 37.0);
        let error = relative(&theta(&readout), expected.as_slice().unwrap());
        assert!(error < 1e-6, "{seed}: {error:e}");
        let error = relative(anchor.gram().as_slice().unwrap(), gram(&u).as_slice().unwrap());
        assert!(error < 1e-9, "{seed}: {error:e}");
    }
}

#[test]
fn the_penalty_has_the_least_error_on_held_out_rows() {
    let (all, all_lengths) = data(5, 750, 60);
    let (x, lengths) = (all.slice(s![..150, ..]).to_owned(), all_lengths[..150].to_vec());
    let options = options(None);
    let (readout, _) = fit(&Rows::F32(x.view()), &lengths, &options).unwrap();
    let spearman = readout.meta().train_spearman.unwrap();
    assert!(spearman > 0.3, "{spearman} {}", readout.lam());
    assert!(readout.noise().unwrap().count() > 0.0);
    // Moments alone choose the same.
    let mut moments = Moments::new(60, options.clone()).unwrap();
    for start in (0..150).step_by(40) {
        let end = (start + 40).min(150);
        moments.add(&Rows::F32(x.slice(s![start..end, ..])), &lengths[start..end]).unwrap();
    }
    let (streamed, _) = moments.finish().unwrap();
    assert_eq!(streamed.lam(), readout.lam());
    assert!(relative(&theta(&streamed), &theta(&readout)) < 1e-5);
    // Far from the chosen penalty, rows never seen are predicted worse.
    let (fresh, truth) = (all.slice(s![150.., ..]).to_owned(), &all_lengths[150..]);
    let error = |lam: Option<f64>| {
        let (r, _) = fit(&Rows::F32(x.view()), &lengths, &FitOptions { lam, ..options.clone() }).unwrap();
        let scores = r.score(&Rows::F32(fresh.view())).unwrap();
        scores.iter().zip(truth).map(|(s, l)| (f64::from(*s) - l.sqrt()).powi(2)).sum::<f64>()
    };
    let chosen = error(None);
    assert!(chosen < error(Some(1e-3 * readout.lam())));
    assert!(chosen < error(Some(1e4 * readout.lam())));
}

#[test]
fn constant_features_weigh_nothing() {
    let (mut x, lengths) = data(6, 100, 5);
    x.column_mut(2).fill(1234.5);
    x.column_mut(3).fill(0.0);
    let (readout, _) = fit(&Rows::F32(x.view()), &lengths, &options(Some(1.0))).unwrap();
    assert_eq!(readout.parts().weight[2], 0.0);
    assert_eq!(readout.parts().weight[3], 0.0);
    assert!(readout.parts().scale.iter().all(|&s| s > 0.0));
}

#[test]
fn unusable_data_is_named() {
    let (x, mut lengths) = data(7, 50, 4);
    let rows = Rows::F32(x.view());
    let text = |r: leap::Result<(Readout, Anchor)>| match r {
        Err(Error::Readout(text) | Error::Config(text) | Error::Numeric(text)) => text,
        other => panic!("{other:?}"),
    };
    assert!(text(fit(&rows, &[7.0; 50], &options(None))).contains("target has no variance"));
    assert!(text(fit(&rows, &[7.0; 49], &options(None))).contains("49 lengths"));
    assert!(text(fit(&rows, &lengths, &options(Some(f64::NAN)))).contains("lam"));
    assert!(text(fit(&rows, &lengths, &FitOptions { folds: 1, ..options(None) })).contains("folds"));
    assert!(text(fit(&Rows::F32(x.slice(s![..3, ..])), &lengths[..3], &options(None))).contains("folds"));
    // More features than rows and no penalty: no unique solution.
    let (wide, few) = data(8, 20, 40);
    assert!(text(fit(&Rows::F32(wide.view()), &few, &options(Some(0.0)))).contains("not positive definite"));
    lengths[31] = 0.0;
    assert!(text(fit(&rows, &lengths, &options(None))).contains("row 31"));
    let mut bad = x.clone();
    bad[(17, 3)] = f32::NAN;
    assert!(text(fit(&Rows::F32(bad.view()), &[7.0; 50], &options(None))).contains("row 17, column 3"));
}

#[test]
fn learning_from_the_anchor_equals_fitting_all_rows_at_once() {
    let (x, lengths) = data(9, 700, 60);
    let (old, new) = (x.slice(s![..400, ..]).to_owned(), x.slice(s![400.., ..]).to_owned());
    let (readout, anchor) = fit(&Rows::F32(old.view()), &lengths[..400], &options(Some(50.0))).unwrap();
    let y: Vec<f64> = lengths.iter().map(|l| l.sqrt()).collect();
    let expected = by_brute_force(&standardised(&readout, &x), &y, 50.0);
    let u = standardised(&readout, &new);
    let dir = std::env::temp_dir().join(format!("leap-anchor-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("r.safetensors");
    let beside = Anchor::path_for(&file);
    assert!(beside.ends_with("r.anchor.safetensors"));
    anchor.save(&beside).unwrap();
    let stored = Anchor::load(&beside).unwrap();
    stored.check(&readout).unwrap();
    // The fitted parameters are rounded to f32 in the readout; the exact ones are those of the objective.
    let start = by_brute_force(&standardised(&readout, &old), &y[..400], 50.0).to_vec();
    for (anchor, precision, tolerance) in
        [(&anchor, Precision::F64, 1e-7), (&stored, Precision::F64, 1e-5), (&stored, Precision::F32, 1e-4)]
    {
        let mut rls = Rls::with_anchor(&start, anchor, 1.0, precision).unwrap();
        rls.update(&u.view(), &y[400..]).unwrap();
        let error = relative(rls.theta(), expected.as_slice().unwrap());
        assert!(error < tolerance, "{precision:?}: {error:e}");
    }

    let (other, others) = fit(&Rows::F32(new.view()), &lengths[400..], &options(Some(50.0))).unwrap();
    let text = |r: leap::Result<()>| r.unwrap_err().to_string();
    assert!(text(stored.check(&other)).contains("standardised"));
    assert!(text(others.check(&readout)).contains("standardised"));
    let (weak, _) = fit(&Rows::F32(old.view()), &lengths[..400], &options(Some(5.0))).unwrap();
    assert!(text(stored.check(&weak)).contains("lam"));
    let narrow = Rows::F32(old.slice(s![.., ..30])).row(0).err();
    assert!(narrow.is_none());
    let slim = old.slice(s![.., ..30]).to_owned();
    let (slim, _) = fit(&Rows::F32(slim.view()), &lengths[..400], &options(Some(50.0))).unwrap();
    assert!(text(stored.check(&slim)).contains("30"));
    assert!(OnlineReadout::new(other, Some(stored), OnlineOptions::default()).is_err());
    assert!(OnlineReadout::new(readout, Some(anchor), OnlineOptions::default()).unwrap().anchored());
    let mut bytes = std::fs::read(&beside).unwrap();
    bytes.truncate(bytes.len() - 4);
    std::fs::write(&beside, bytes).unwrap();
    assert!(Anchor::load(&beside).unwrap_err().to_string().contains("r.anchor.safetensors"));
    std::fs::remove_dir_all(&dir).unwrap();
}
