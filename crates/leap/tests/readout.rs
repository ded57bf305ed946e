//! Scoring, files and refusals of readouts.

mod common;

use std::collections::BTreeMap;

use common::{Directory, rng};
use half::{bf16, f16};
use leap::Error;
use leap::noise::Noise;
use leap::readout::{Kind, Meta, Parts, Readout, Target};
use leap::rows::{Row, Rows};
use ndarray::Array2;
use proptest::prelude::*;
use rand::RngExt;

fn parts(d: usize, seed: u64) -> Parts {
    let mut r = rng(seed);
    let mut values = |low: f32, high: f32| (0..d).map(|_| r.random_range(low..high)).collect::<Vec<f32>>();
    Parts {
        mean: values(-3.0, 3.0),
        scale: values(0.2, 2.0),
        weight: values(-0.2, 0.2),
        bias: 20.0,
        max_tokens: 4096,
        target: Target::Sqrt,
        lam: 100.0,
        clip: None,
        meta: Meta::new(Kind::State),
        noise: None,
    }
}

/// The formula, term by term in f64.
fn by_formula(p: &Parts, x: &[f64]) -> f64 {
    let mut sum = f64::from(p.bias);
    for (i, x) in x.iter().enumerate() {
        let mut u = (x - f64::from(p.mean[i])) / f64::from(p.scale[i]);
        if let Some(clip) = p.clip {
            u = u.clamp(-f64::from(clip), f64::from(clip));
        }
        sum += u * f64::from(p.weight[i]);
    }
    sum.clamp(p.target.of(1.0), p.target.of(f64::from(p.max_tokens)))
}

fn message<T: std::fmt::Debug>(result: leap::Result<T>) -> String {
    match result.unwrap_err() {
        Error::Readout(text) => text,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn scores_follow_the_formula_in_every_format(d in 1usize..700, seed in 0u64..1000, clip in any::<bool>()) {
        let mut p = parts(d, seed);
        p.clip = clip.then_some(1.5);
        let readout = Readout::new(p.clone()).unwrap();
        let mut r = rng(seed + 1);
        let x: Vec<f32> = (0..d).map(|_| r.random_range(-6.0f32..6.0)).collect();
        let half: Vec<f16> = x.iter().map(|&v| f16::from_f32(v)).collect();
        let brain: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
        let double: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        for row in [Row::F32(&x), Row::F64(&double), Row::F16(&half), Row::Bf16(&brain)] {
            let exact: Vec<f64> = (0..d).map(|i| f64::from(row.get(i).unwrap())).collect();
            prop_assert_eq!(&exact, &row.to_f64_vec());
            let expected = by_formula(&p, &exact);
            let got = f64::from(readout.score_row(row).unwrap());
            prop_assert!((got - expected).abs() < 2e-5 * (1.0 + expected.abs()), "{} {}", got, expected);
        }
    }

    #[test]
    fn scores_and_lengths_stay_in_their_range(v in -1e4f32..1e4, target in 0..3) {
        let target = [Target::Sqrt, Target::Log, Target::Raw][target as usize];
        let p = Parts { target, mean: vec![0.0], scale: vec![1.0], weight: vec![1.0], bias: 0.0, ..parts(1, 0) };
        let readout = Readout::new(p).unwrap();
        let score = f64::from(readout.score_row(Row::F32(&[v])).unwrap());
        prop_assert!(score >= target.of(1.0) && score <= target.of(4096.0) * (1.0 + 1e-6));
        let expected = target.length(f64::from(v)).clamp(1.0, 4096.0);
        let monotone = if target == Target::Sqrt && v < 0.0 { 1.0 } else { expected };
        let rows = Array2::from_elem((1, 1), v);
        let length = readout.predict(&Rows::F32(rows.view())).unwrap()[0];
        prop_assert!((f64::from(length) - monotone).abs() <= 1e-4 * monotone);
    }
}

#[test]
fn a_large_common_offset_does_not_eat_the_digits() {
    let d = 512;
    let p = Parts { mean: vec![1000.0; d], scale: vec![0.5; d], ..parts(d, 3) };
    let readout = Readout::new(p.clone()).unwrap();
    let mut r = rng(4);
    let x: Vec<f32> = (0..d).map(|_| 1000.0 + r.random_range(-1.0f32..1.0)).collect();
    let expected = by_formula(&p, &x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>());
    let got = f64::from(readout.score_row(Row::F32(&x)).unwrap());
    assert!((got - expected).abs() < 0.02, "{got} {expected}");
}

#[test]
fn bad_rows_are_named() {
    let readout = Readout::new(parts(70, 5)).unwrap();
    let mut clipping = parts(70, 5);
    clipping.clip = Some(8.0);
    for readout in [readout, Readout::new(clipping).unwrap()] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = Array2::<f32>::zeros((4, 70));
            x[(2, 65)] = bad;
            let text = message(readout.score(&Rows::F32(x.view())));
            assert!(text.contains("row 2, column 65"), "{text}");
            let b = x.mapv(bf16::from_f32);
            assert!(message(readout.score(&Rows::Bf16(b.view()))).contains("row 2, column 65"));
            let h = x.mapv(f16::from_f32);
            assert!(message(readout.score(&Rows::F16(h.view()))).contains("row 2, column 65"));
            let f = x.mapv(f64::from);
            assert!(message(readout.score(&Rows::F64(f.view()))).contains("row 2, column 65"));
        }
        let wide = Array2::<f32>::zeros((4, 71));
        let text = message(readout.score(&Rows::F32(wide.view())));
        assert!(text.contains("71") && text.contains("70"), "{text}");
        assert!(message(readout.score_row(Row::F32(&[0.0; 3]))).contains("3 features"));
    }
    // A NaN under a weight of zero is still a NaN.
    let p = Parts { weight: vec![0.0; 70], ..parts(70, 5) };
    let mut x = [0f32; 70];
    x[1] = f32::INFINITY;
    assert!(message(Readout::new(p).unwrap().score_row(Row::F32(&x))).contains("column 1"));
}

#[test]
fn an_overflow_of_finite_features_is_called_one() {
    let p = Parts { weight: vec![1.0; 70], scale: vec![0.5; 70], ..parts(70, 6) };
    let text = message(Readout::new(p).unwrap().score_row(Row::F32(&[3e38; 70])));
    assert!(text.contains("overflow") && !text.contains("NaN"), "{text}");
}

#[test]
fn rows_that_are_not_contiguous_are_refused() {
    let readout = Readout::new(parts(2, 7)).unwrap();
    let x = Array2::<f32>::zeros((2, 3));
    assert!(message(readout.score(&Rows::F32(x.t()))).contains("contiguous"));
}

#[test]
fn impossible_parts_are_refused() {
    let bad = [
        Parts { scale: vec![0.0; 3], ..parts(3, 8) },
        Parts { scale: vec![1.0; 2], ..parts(3, 8) },
        Parts { weight: vec![f32::NAN; 3], ..parts(3, 8) },
        Parts { bias: f32::INFINITY, ..parts(3, 8) },
        Parts { max_tokens: 0, ..parts(3, 8) },
        Parts { lam: -1.0, ..parts(3, 8) },
        Parts { clip: Some(0.0), ..parts(3, 8) },
        parts(0, 8),
    ];
    for p in bad {
        assert!(!message(Readout::new(p)).is_empty());
    }
}

#[test]
fn a_file_gives_the_same_readout_and_the_same_bytes() {
    let dir = Directory::new("readout");
    let mut p = parts(33, 9);
    p.meta = Meta {
        kind: Kind::Prompt,
        model: Some("a model".into()),
        layer: Some(20),
        fit_date: Some("2026-01-31".into()),
        train_spearman: Some(0.1 + 0.2),
        trained_on: vec!["one".into(), "two, with a comma".into()],
        extra: BTreeMap::from([("sampling".into(), "temperature 0.7".into())]),
    };
    p.lam = 10f64.powf(2.5);
    p.target = Target::Log;
    let mut noise = Noise::new(4096);
    noise.observe(12.0, 1.0 / 3.0, 0.1);
    p.noise = Some(noise);
    p.clip = Some(8.0);
    let readout = Readout::new(p.clone()).unwrap();
    let (one, two) = (dir.0.join("one.safetensors"), dir.0.join("two.safetensors"));
    readout.save(&one).unwrap();
    let loaded = Readout::load(&one).unwrap();
    assert_eq!(loaded.parts(), &p);
    loaded.save(&two).unwrap();
    assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 2);

    p.meta.extra.insert("lam".into(), "1".into());
    assert!(message(Readout::new(p).unwrap().save(&one)).contains("lam"));
    assert!(matches!(Readout::load(&dir.0.join("none")), Err(Error::Io { .. })));
}

/// A safetensors file by hand: name, dtype, shape and f32 values of each tensor.
fn write(path: &std::path::Path, metadata: &BTreeMap<&str, &str>, tensors: &[(&str, &str, Vec<usize>, Vec<f32>)]) {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!(metadata));
    let mut data = Vec::new();
    for (name, dtype, shape, values) in tensors {
        let start = data.len();
        values.iter().for_each(|v| data.extend(v.to_le_bytes()));
        let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert((*name).into(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn broken_files_are_refused_by_name() {
    let dir = Directory::new("broken");
    let path = dir.0.join("bad.safetensors");
    let good: BTreeMap<&str, &str> = BTreeMap::from([
        ("leap_readout_version", "1"),
        ("kind", "state"),
        ("d", "2"),
        ("max_tokens", "100"),
        ("target", "sqrt"),
        ("lam", "10"),
        ("trained_on", "[]"),
    ]);
    let tensor = |name: &'static str, n: usize| (name, "F32", vec![n], vec![1f32; n]);
    let tensors = vec![tensor("mean", 2), tensor("scale", 2), tensor("weight", 2), tensor("bias", 1)];
    write(&path, &good, &tensors);
    assert_eq!(Readout::load(&path).unwrap().d(), 2);

    let check = |metadata: &BTreeMap<&str, &str>, tensors: &[_], what: &str| {
        write(&path, metadata, tensors);
        let text = message(Readout::load(&path));
        assert!(text.contains("bad.safetensors") && text.contains(what), "{text}");
    };
    for (key, value, what) in [
        ("leap_readout_version", "2", "leap_readout_version"),
        ("d", "3", "mean"),
        ("d", "two", "\"two\""),
        ("target", "cube", "target"),
        ("max_tokens", "0", "max_tokens"),
        ("max_tokens", "-1", "max_tokens"),
        ("lam", "NaN", "lam"),
        ("trained_on", "[", "trained_on"),
        ("noise", "{}", "noise"),
    ] {
        let mut metadata = good.clone();
        metadata.insert(key, value);
        check(&metadata, &tensors, what);
    }
    for key in ["leap_readout_version", "kind", "d", "max_tokens", "target", "lam", "trained_on"] {
        let mut metadata = good.clone();
        metadata.remove(key);
        check(&metadata, &tensors, key);
    }
    for i in 0..4 {
        let name = tensors[i].0;
        let mut changed = tensors.clone();
        changed.remove(i);
        check(&good, &changed, name);
        let mut changed = tensors.clone();
        changed[i].3[0] = f32::NAN;
        check(&good, &changed, name);
        let mut changed = tensors.clone();
        changed[i].1 = "I32";
        check(&good, &changed, name);
        let mut changed = tensors.clone();
        changed[i].2.insert(0, 1);
        check(&good, &changed, name);
    }
    write(&path, &good, &tensors);
    let bytes = std::fs::read(&path).unwrap();
    for end in [0, 4, 20, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(message(Readout::load(&path)).contains("bad.safetensors"));
    }
}
