//! Prompt features of 200 and 2,000 tokens from the projected table, beside the mean of the unprojected embedding rows
//! through ndarray.

mod common;

use common::side_by_side;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use leap::prompt::PromptFeatures;
use leap::rows::{Row, Rows};
use ndarray::{Array1, Array2, Axis};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const VOCABULARY: usize = 32_768;
const D: usize = 896;
const DIM: usize = 256;

fn plain_mean(embedding: &Array2<f32>, ids: &[u32]) -> Array1<f32> {
    let mut sum = Array1::zeros(D);
    for &id in ids {
        sum += &embedding.index_axis(Axis(0), id as usize);
    }
    sum / ids.len() as f32
}

fn pool(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let embedding = Array2::from_shape_simple_fn((VOCABULARY, D), || rng.random_range(-1.0f32..1.0));
    let features = PromptFeatures::new(&Rows::F32(embedding.view()), DIM, 0).expect("a finite table");

    println!("prompt features, {DIM} of {D} dimensions in f16: times as fast [quartiles]");
    for tokens in [200u32, 2_000] {
        let ids: Vec<u32> = (0..tokens).map(|_| rng.random_range(0..VOCABULARY as u32)).collect();
        let mean = plain_mean(&embedding, &ids);
        let expected = features.project(Row::F32(mean.as_slice().expect("one piece")), tokens).expect("finite means");
        let found = features.pool(&ids).expect("known ids");
        let largest = expected[..DIM].iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-2 * largest;
        assert!(
            found[..DIM].iter().zip(&expected[..DIM]).all(close),
            "the projection of a mean is the mean of projections"
        );
        let n = tokens as f32;
        assert_eq!(found[DIM..], [n.sqrt(), n.ln_1p(), n]);

        let mut group = criterion.benchmark_group("pool");
        group.throughput(Throughput::Elements(u64::from(tokens)));
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| b.iter(|| features.pool(&ids)));
        group.finish();
        let what = format!("{tokens} tokens");
        side_by_side(&what, || features.pool(&ids), "ndarray's mean of all in f32", || plain_mean(&embedding, &ids));
    }
}

criterion_group! { name = benches; config = common::criterion(); targets = pool }
criterion_main!(benches);
