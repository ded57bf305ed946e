//! What the waiting queue does at every step, with 1,000 and 100,000 requests in it, beside the standard library's heap,
//! which can neither remove nor rekey.

mod common;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use common::side_by_side;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use leap::queue::{AgingQueue, static_key};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const AGING_RATE: f64 = 0.05;
/// Requests a second; only the spread of the arrivals matters.
const RATE: f64 = 50.0;

/// Key bits that sort as the key does (positive floats sort as their bits), then the arrival.
type Entry = Reverse<(u64, u64)>;

fn entry(id: u64, remaining: f64, arrival_s: f64) -> Entry {
    let key = static_key(remaining, AGING_RATE, arrival_s, 0.0, 0.0);
    Reverse((key.max(0.0).to_bits(), id))
}

fn queue(criterion: &mut Criterion) {
    for n in [1_000u64, 100_000] {
        let mut rng = ChaCha8Rng::seed_from_u64(n);
        let mut request = |id: u64| (id, rng.random_range(1.0f64..4096.0), id as f64 / RATE);
        let requests: Vec<_> = (0..n).map(&mut request).collect();

        let mut aging = AgingQueue::new(AGING_RATE).expect("a rate of the right sign");
        let mut heap = BinaryHeap::new();
        for &(id, remaining, arrival_s) in &requests {
            aging.push(id, remaining, arrival_s).expect("a new id");
            heap.push(entry(id, remaining, arrival_s));
        }
        let mut expected = heap.clone();
        let mut emptied = aging.clone();
        while let Some(Reverse((_, id))) = expected.pop() {
            assert_eq!(emptied.pop(), Some(id), "the order is that of a sort by key, then arrival");
        }
        assert!(emptied.is_empty());

        let (mut next_ours, mut next_heap) = (n, n);
        let lengths: Vec<f64> = (0..4096).map(|i| request(i).1).collect();
        let length = |id: u64| lengths[(id % 4096) as usize];
        let mut turnover = |aging: &mut AgingQueue| {
            let first = aging.pop();
            aging.push(next_ours, length(next_ours), next_ours as f64 / RATE).expect("a new id");
            next_ours += 1;
            first
        };
        let mut plain = |heap: &mut BinaryHeap<Entry>| {
            let first = heap.pop();
            heap.push(entry(next_heap, length(next_heap), next_heap as f64 / RATE));
            next_heap += 1;
            first
        };

        let mut group = criterion.benchmark_group("queue");
        let mut at = 0;
        let mut settled = aging.clone();
        group.bench_function(BenchmarkId::new("rekey", n), |b| {
            b.iter(|| {
                at = (at + 7919) % n;
                settled.rekey(at, length(at))
            });
        });
        group.bench_function(BenchmarkId::new("remove and push", n), |b| {
            b.iter(|| {
                at = (at + 7919) % n;
                settled.remove(at) && settled.push(at, length(at), at as f64 / RATE).is_ok()
            });
        });
        group.bench_function(BenchmarkId::new("peek", n), |b| b.iter(|| settled.peek()));
        group.bench_function(BenchmarkId::new("pop and push", n), |b| b.iter(|| turnover(&mut aging)));
        group.finish();
        side_by_side(
            &format!("queue pop and push, {n} entries"),
            || turnover(&mut aging),
            "BinaryHeap",
            || plain(&mut heap),
        );
    }
}

criterion_group! { name = benches; config = common::criterion(); targets = queue }
criterion_main!(benches);
