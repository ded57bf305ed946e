//! One update of recursive least squares by eight finished requests, beside the same formula through ndarray and BLAS.

mod common;

use std::time::Instant;

use common::{cycles_side_by_side, read, readable};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use leap::rls::{Precision, Rls};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView2, s};
use ndarray_linalg::{FactorizeInto, Solve};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const K: usize = 8;
const LAM: f64 = 100.0;
/// Updates from one rewriting of P to the next divide this, and the test of P comes once in as many at d = 4096.
const CYCLE: u32 = 32;
const LONG_CYCLE: u32 = 16 * CYCLE;
/// Distinct batches that are gone through in turn, so that P does not collapse along eight directions.
const BATCHES: usize = 32;

/// The textbook's update in f32: V = P U', G = V (I + U V)^-1, theta += G (y - U theta), P -= G V'.
struct Textbook {
    theta: Array1<f32>,
    p: Array2<f32>,
}

impl Textbook {
    fn update(&mut self, u: &ArrayView2<f32>, y: &Array1<f32>) {
        let v = self.p.dot(&u.t());
        let gain = u.dot(&v) + Array2::<f32>::eye(K);
        let factors = gain.factorize_into().expect("I + U V is positive definite");
        let mut g = Array2::zeros(v.raw_dim());
        for (row, mut out) in v.rows().into_iter().zip(g.rows_mut()) {
            out.assign(&factors.solve(&row.to_owned()).expect("factors of full rank"));
        }
        self.theta += &g.dot(&(y - &u.dot(&self.theta)));
        general_mat_mul(-1.0, &g, &v.t(), 1.0, &mut self.p);
    }
}

fn rls(criterion: &mut Criterion) {
    for features in [259, 1024, 4096] {
        let d = features + 1;
        let mut rng = ChaCha8Rng::seed_from_u64(features as u64);
        let mut u = Array2::from_shape_simple_fn((BATCHES * K, d), || rng.random_range(-1.7f64..1.7));
        u.column_mut(d - 1).fill(1.0);
        let y = Array1::from_shape_simple_fn(BATCHES * K, || rng.random_range(1.0f64..60.0));
        let single = (u.mapv(|v| v as f32), y.mapv(|v| v as f32));
        let rows = |i: usize| (i % BATCHES * K)..(i % BATCHES * K + K);

        let fresh = || {
            let ours = Rls::with_diagonal(&vec![0.0; d], &vec![1.0 / LAM; d], 1.0, Precision::F32).expect("finite P0");
            let p = Array2::from_diag_elem(d, 1.0 / LAM as f32);
            (ours, Textbook { theta: Array1::zeros(d), p })
        };
        let mut ours_step = 0;
        let mut book_step = 0;
        let (mut ours, mut book) = fresh();
        let mut update = |ours: &mut Rls| {
            let at = rows(ours_step);
            ours_step += 1;
            ours.update(&u.slice(s![at.clone(), ..]), y.slice(s![at]).as_slice().expect("one piece"))
                .expect("finite rows")
        };
        let mut textbook = |book: &mut Textbook| {
            let at = rows(book_step);
            book_step += 1;
            book.update(&single.0.slice(s![at.clone(), ..]), &single.1.slice(s![at]).to_owned());
        };
        for _ in 0..4 {
            update(&mut ours);
            textbook(&mut book);
        }
        let largest = book.theta.iter().fold(0.0f64, |most, v| most.max(f64::from(v.abs())));
        let close = |(a, b): (&f64, &f32)| (a - f64::from(*b)).abs() <= 1e-3 * largest;
        assert!(ours.theta().iter().zip(&book.theta).all(close), "theta agrees with the textbook at d = {features}");

        let mut group = criterion.benchmark_group("rls update k=8");
        group.bench_function(BenchmarkId::new("f32", features), |b| b.iter(|| update(&mut ours)));
        group.finish();
        println!("rls update, d = {features}, k = {K}, f32, with its share of the folds: times as fast [quartiles]");
        cycles_side_by_side("the same formula", CYCLE, || update(&mut ours), "ndarray", || textbook(&mut book));
        let lower = vec![1f32; d * (d + 1) / 2];
        cycles_side_by_side(
            "the traffic it cannot do without",
            CYCLE,
            || update(&mut ours),
            "reading half of P",
            || read(&lower),
        );
        let times: Vec<f64> = (0..LONG_CYCLE)
            .map(|_| {
                let start = Instant::now();
                update(&mut ours);
                start.elapsed().as_secs_f64()
            })
            .collect();
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let longest = times.iter().copied().fold(0.0, f64::max);
        println!("with tests of P as well: mean {}, longest {}", readable(mean), readable(longest));
    }
}

criterion_group! { name = benches; config = common::criterion(); targets = rls }
criterion_main!(benches);
