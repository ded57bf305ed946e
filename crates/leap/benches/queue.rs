//! What the waiting queue does at every step, with 1,000 and 100,000 requests in it, beside the standard library's heap,
//! which can neither remove nor rekey, and its ordered set, which can; and what a request's place in it costs once: the
//! distribution of its length and the table of its Gittins order, beside the order's formula at every level.

mod common;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use common::side_by_side;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use leap::noise::Noise;
use leap::queue::{AgingQueue, static_key};
use leap::remaining::{GittinsTable, Objective, gittins_at, next_level};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const AGING_RATE: f64 = 0.05;
/// Output budget of the requests whose order is computed.
const CAP: u32 = 4096;
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
        println!("queue of {n}: times as fast [quartiles]");
        side_by_side("pop and push", || turnover(&mut aging), "BinaryHeap", || plain(&mut heap));
        let key = |id: u64, length: f64| entry(id, length, id as f64 / RATE).0;
        let mut lengths_now: Vec<f64> = (0..n).map(length).collect();
        let mut set: BTreeSet<(u64, u64)> = (0..n).map(|id| key(id, length(id))).collect();
        let (mut step, mut set_step) = (0, 0);
        let next = |step: &mut u64| {
            *step += 1;
            (*step * 7919 % n, length(*step))
        };
        side_by_side(
            "rekey",
            || {
                let (id, new) = next(&mut step);
                settled.rekey(id, new)
            },
            "BTreeSet",
            || {
                let (id, new) = next(&mut set_step);
                let old = std::mem::replace(&mut lengths_now[id as usize], new);
                set.remove(&key(id, old)) && set.insert(key(id, new))
            },
        );
    }
}

fn order(criterion: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut noise = Noise::new(CAP);
    for _ in 0..5_000 {
        noise.observe(rng.random_range(1.0f64..60.0), rng.random_range(-20.0f64..20.0), 0.1);
    }
    let distribution = noise.distribution(30.0, CAP);
    let table = GittinsTable::new(&distribution, CAP, Objective::Ptl);
    let levels: Vec<u32> = std::iter::successors(Some(0), |&a| Some(next_level(a))).take_while(|&a| a < CAP).collect();
    let by_formula = || -> Vec<f64> {
        let at = |&a: &u32| gittins_at(&distribution, f64::from(CAP), Objective::Ptl, f64::from(a));
        levels.iter().map(at).collect()
    };
    let close = |(&a, b): (&u32, f64)| (table.remaining(a) - b).abs() <= 1e-5 * b;
    assert!(levels.iter().zip(by_formula()).all(close), "the table is the formula at its levels");

    let mut score = 0.0;
    let mut placed = || {
        score = (score + 7.3) % 60.0;
        GittinsTable::new(&noise.distribution(score, CAP), CAP, Objective::Ptl)
    };
    criterion.bench_function("order/distribution and table", |b| b.iter(&mut placed));
    println!("order of one request, cap {CAP}, {} lengths: times as fast [quartiles]", distribution.lengths.len());
    let what = format!("table of {} levels", levels.len());
    side_by_side(&what, || GittinsTable::new(&distribution, CAP, Objective::Ptl), "level by level", by_formula);
    side_by_side("length distribution and table", placed, "the levels alone, one by one", by_formula);
}

criterion_group! { name = benches; config = common::criterion(); targets = queue, order }
criterion_main!(benches);
