//! Predictions by a readout of 4,096 features, beside the same dot product through ndarray and beside the machine's read
//! bandwidth.

mod common;

use common::{read, side_by_side};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use leap::readout::{Kind, Meta, Parts, Readout, Target};
use leap::rows::Rows;
use ndarray::{Array1, Array2, ArrayView2, s};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const D: usize = 4096;
const BATCHES: [usize; 3] = [1, 8, 64];
/// Rows of the pool that is read through: 256 MiB in f32, more than a level-two cache holds.
const POOL: usize = 16_384;
const MAX_TOKENS: u32 = 4096;

fn readout(rng: &mut ChaCha8Rng) -> Readout {
    let mut draw = |low: f32, high: f32| (0..D).map(|_| rng.random_range(low..high)).collect::<Vec<f32>>();
    let (mean, scale, weight) = (draw(-0.5, 0.5), draw(0.5, 2.0), draw(-0.1, 0.1));
    Readout::new(Parts {
        mean,
        scale,
        weight,
        bias: 20.0,
        max_tokens: MAX_TOKENS,
        target: Target::Sqrt,
        lam: 1.0,
        clip: None,
        meta: Meta::new(Kind::State),
        noise: None,
    })
    .expect("a readout of finite numbers")
}

/// Weight and bias on raw features: what the dot product through ndarray is given for free.
fn folded(readout: &Readout) -> (Array1<f32>, f32) {
    let p = readout.parts();
    let weight: Array1<f32> = p.weight.iter().zip(&p.scale).map(|(w, s)| w / s).collect();
    let shift: f64 = weight.iter().zip(&p.mean).map(|(w, m)| f64::from(*w) * f64::from(*m)).sum();
    (weight, (f64::from(p.bias) - shift) as f32)
}

fn through_ndarray(x: &ArrayView2<f32>, weight: &Array1<f32>, bias: f32) -> Array1<f32> {
    (x.dot(weight) + bias).mapv(|m| m.clamp(1.0, (MAX_TOKENS as f32).sqrt()).powi(2))
}

fn predict(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let readout = readout(&mut rng);
    let (weight, bias) = folded(&readout);
    let pool = Array2::from_shape_simple_fn((POOL, D), || rng.random_range(-1.0f32..1.0));
    let half = pool.mapv(bf16::from_f32);

    let expected = through_ndarray(&pool.view(), &weight, bias);
    let found = readout.predict(&Rows::F32(pool.view())).expect("finite rows");
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-3 * b), "f32 predictions agree with ndarray");
    let expected = through_ndarray(&half.mapv(f32::from).view(), &weight, bias);
    let found = readout.predict(&Rows::Bf16(half.view())).expect("finite rows");
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-3 * b), "bf16 predictions agree with ndarray");

    let mut group = criterion.benchmark_group("predict d=4096");
    for n in BATCHES {
        group.throughput(Throughput::Elements(n as u64));
        let few = pool.slice(s![..n, ..]);
        let few_half = half.slice(s![..n, ..]);
        group.bench_function(BenchmarkId::new("f32", n), |b| b.iter(|| readout.predict(&Rows::F32(few))));
        group.bench_function(BenchmarkId::new("bf16", n), |b| b.iter(|| readout.predict(&Rows::Bf16(few_half))));
        group.bench_function(BenchmarkId::new("ndarray f32", n), |b| b.iter(|| through_ndarray(&few, &weight, bias)));
    }
    group.finish();

    println!("predict, d = {D}: times as fast [quartiles]");
    for n in BATCHES {
        let few = pool.slice(s![..n, ..]);
        let few_half = half.slice(s![..n, ..]);
        let reference = || through_ndarray(&few, &weight, bias);
        side_by_side(&format!("f32 rows, batch {n}"), || readout.predict(&Rows::F32(few)), "ndarray", reference);
        side_by_side(&format!("bf16 rows, batch {n}"), || readout.predict(&Rows::Bf16(few_half)), "ndarray", reference);
    }
    let all = pool.as_slice().expect("rows that lie one after the other");
    side_by_side(
        &format!("f32 rows, {} MiB of them", (POOL * D * 4) >> 20),
        || readout.predict(&Rows::F32(pool.view())),
        "reading them",
        || read(all),
    );
    side_by_side(
        &format!("bf16 rows, {} MiB of them", (POOL * D * 2) >> 20),
        || readout.predict(&Rows::Bf16(half.view())),
        "reading them",
        || read(&all[..POOL * D / 2]),
    );
}

criterion_group! { name = benches; config = common::criterion(); targets = predict }
criterion_main!(benches);
