//! Both forms of every kernel against the sum in f64, term by term.

use half::{bf16, f16};
use proptest::prelude::*;

use super::dot::{Brain, Dot, Double, Half, Single};
use super::gram::AddGram;
use super::pool::AddHalves;
use super::tile::{Part, Strips};
use super::*;

/// What the portable form gives and what this processor's gives.
fn both<K: Kernel>(kernel: impl Fn() -> K) -> [K::Out; 2] {
    [kernel().run(Portable), dispatch(kernel())]
}

/// A product's terms rounded to `epsilon` each, and their partial sums as often as there are terms in one.
fn check_dot(found: [f64; 2], x: &[f64], w: &[f32], epsilon: f64) {
    let terms: Vec<f64> = x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).collect();
    let (sum, size): (f64, f64) = (terms.iter().sum(), terms.iter().map(|t| t.abs()).sum());
    let bound = epsilon * (2.0 + x.len() as f64 / 64.0) * size;
    for found in found {
        assert!((found - sum).abs() <= bound, "{found} instead of {sum}, bound {bound:e}");
    }
}

/// Pairs of a feature and a weight, of a length that may leave a rest in every kind of block.
fn pairs() -> impl Strategy<Value = (Vec<f32>, Vec<f32>)> {
    prop::collection::vec((-100f32..100.0, -1f32..1.0), 0..400).prop_map(|pairs| pairs.into_iter().unzip())
}

/// Small numbers of either sign that follow from a seed.
fn numbers(n: usize, mut seed: u64) -> Vec<f64> {
    std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    })
    .take(n)
    .collect()
}

trait Real: Scalar + Into<f64> {
    const UNIT: f64;

    fn of(v: f64) -> Self;
}

impl Real for f32 {
    const UNIT: f64 = f32::EPSILON as f64;

    fn of(v: f64) -> Self {
        v as f32
    }
}

impl Real for f64 {
    const UNIT: f64 = f64::EPSILON;

    fn of(v: f64) -> Self {
        v
    }
}

fn run<T: Real>(rows: &[T], columns: usize, column: usize, part: Part, n: usize, u: &[T]) -> [Vec<f64>; 2] {
    let mut outs = [0; 2].map(|_| vec![T::ZERO; u.len()]);
    let [portable, native] = &mut outs;
    Strips { rows, columns, column, part, n, u, out: portable }.run(Portable);
    dispatch(Strips { rows, columns, column, part, n, u, out: native });
    outs.map(|out| out.into_iter().map(Into::into).collect())
}

/// Entries of the rows and of u are at most 1 in size, so no partial sum exceeds its number of terms.
fn check_all(found: &[Vec<f64>; 2], expected: &[f64], bound: f64) {
    for found in found {
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!((a - b).abs() <= bound, "{i}: {a} instead of {b}, bound {bound:e}");
        }
    }
}

fn check_tile<T: Real>(row: usize, rows: usize, columns: usize, k: usize, seed: u64) {
    // On the diagonal where `row` is 0.
    let (n, square) = (row.max(columns) + rows, row == 0);
    let (row, columns) = if square { (2, rows) } else { (row.max(columns), columns) };
    let column = if square { 2 } else { row - columns };
    let n = n.max(row + rows);
    let tile: Vec<T> = numbers(rows * columns, seed).into_iter().map(T::of).collect();
    let u: Vec<T> = numbers(k * n, seed + 1).into_iter().map(T::of).collect();
    let mut expected = vec![0.0; k * n];
    for a in 0..k {
        for r in 0..rows {
            for c in 0..columns {
                let t: f64 = tile[r * columns + c].into();
                expected[a * n + column + c] += t * u[a * n + row + r].into();
                if !square {
                    expected[a * n + row + r] += t * u[a * n + column + c].into();
                }
            }
        }
    }
    let terms = (rows + columns) as f64;
    check_all(&run(&tile, columns, column, Part::Tile { row }, n, &u), &expected, T::UNIT * terms * terms);
}

fn check_rows<T: Real>(rows: usize, n: usize, k: usize, seed: u64) {
    let w: Vec<T> = numbers(rows * n, seed).into_iter().map(T::of).collect();
    let u: Vec<T> = numbers(k * n, seed + 1).into_iter().map(T::of).collect();
    let wide = |v: &[T]| v.iter().map(|&v| v.into()).collect::<Vec<f64>>();
    let mut expected = vec![0.0; k * n];
    for (u, out) in wide(&u).chunks(n).zip(expected.chunks_mut(n)) {
        for w in wide(&w).chunks(n) {
            let by: f64 = u.iter().zip(w).map(|(u, w)| u * w).sum();
            out.iter_mut().zip(w).for_each(|(o, w)| *o -= by * w);
        }
    }
    let bound = T::UNIT * (rows * n * (rows + n)) as f64;
    check_all(&run(&w, n, 0, Part::Rows, n, &u), &expected, bound);
}

fn check_gram<T: Real>(k: usize, (row, rows): (usize, usize), (column, columns): (usize, usize), seed: u64) {
    let n = (row + rows).max(column + columns);
    let x: Vec<T> = numbers(k * n, seed).into_iter().map(T::of).collect();
    let before: Vec<T> = numbers(rows * columns, seed + 1).into_iter().map(T::of).collect();
    let (alpha, beta) = (T::of(-0.5), T::of(0.25));
    let mut expected: Vec<f64> = before.iter().map(|&v| 0.25 * v.into()).collect();
    for (at, e) in expected.iter_mut().enumerate() {
        let (r, c) = (row + at / columns, column + at % columns);
        *e -= (0..k).map(|i| 0.5 * x[i * n + r].into() * x[i * n + c].into()).sum::<f64>();
    }
    let panels = &Panels::new(&x, n);
    let mut tiles = [before.clone(), before];
    let [portable, native] = &mut tiles;
    AddGram { panels, alpha, beta, row, column, columns, tile: portable }.run(Portable);
    dispatch(AddGram { panels, alpha, beta, row, column, columns, tile: native });
    let bound = T::UNIT * (k * k + 2) as f64;
    check_all(&tiles.map(|t| t.into_iter().map(Into::into).collect()), &expected, bound);
}

proptest! {
    #[test]
    fn grams(k in 1usize..12, r in 0usize..4, rows in 1usize..30, c in 0usize..4, columns in 1usize..40, seed in 0u64..1 << 40) {
        check_gram::<f32>(k, (8 * r, rows), (8 * c, columns), seed);
        check_gram::<f64>(k, (8 * r, rows), (8 * c, columns), seed);
    }

    #[test]
    fn dots((x, w) in pairs()) {
        let wide: Vec<f64> = x.iter().map(|&v| v.into()).collect();
        check_dot(both(|| Dot::<Single> { x: &x, w: &w }), &wide, &w, f32::EPSILON.into());
        check_dot(both(|| Dot::<Double> { x: &wide, w: &w }), &wide, &w, f64::EPSILON);
        let half: Vec<f16> = x.iter().map(|&v| f16::from_f32(v)).collect();
        let bits: Vec<u16> = half.iter().map(|v| v.to_bits()).collect();
        let wide: Vec<f64> = half.iter().map(|v| v.to_f64()).collect();
        check_dot(both(|| Dot::<Half> { x: &bits, w: &w }), &wide, &w, f32::EPSILON.into());
        let brain: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
        let bits: Vec<u16> = brain.iter().map(|v| v.to_bits()).collect();
        let wide: Vec<f64> = brain.iter().map(|v| v.to_f64()).collect();
        check_dot(both(|| Dot::<Brain> { x: &bits, w: &w }), &wide, &w, f32::EPSILON.into());
    }

    #[test]
    fn tiles(row in 0usize..60, rows in 1usize..40, columns in 1usize..40, k in 1usize..11, seed in 0u64..1 << 40) {
        check_tile::<f32>(row, rows, columns, k, seed);
        check_tile::<f64>(row, rows, columns, k, seed);
    }

    #[test]
    fn deflations(rows in 0usize..20, n in 1usize..60, k in 1usize..11, seed in 0u64..1 << 40) {
        check_rows::<f32>(rows, n, k, seed);
        check_rows::<f64>(rows, n, k, seed);
    }

    #[test]
    fn sums_of_halves(rows in prop::collection::vec(prop::collection::vec(-9f32..9.0, 21), 0..11)) {
        let rows: Vec<Vec<f16>> = rows.iter().map(|r| r.iter().map(|&v| f16::from_f32(v)).collect()).collect();
        let bits: Vec<Vec<u16>> = rows.iter().map(|r| r.iter().map(|v| v.to_bits()).collect()).collect();
        let bytes: Vec<Vec<[u8; 2]>> = rows.iter().map(|r| r.iter().map(|v| v.to_le_bytes()).collect()).collect();
        let mut expected = vec![1.5; 21];
        for row in &rows {
            expected.iter_mut().zip(row).for_each(|(e, v)| *e += v.to_f64());
        }
        let mut sums = [0; 4].map(|_| vec![1.5; 21]);
        let [a, b, c, d] = &mut sums;
        AddHalves { rows: bits.iter().map(Vec::as_slice), sums: a }.run(Portable);
        dispatch(AddHalves { rows: bits.iter().map(Vec::as_slice), sums: b });
        AddHalves { rows: bytes.iter().map(Vec::as_slice), sums: c }.run(Portable);
        dispatch(AddHalves { rows: bytes.iter().map(Vec::as_slice), sums: d });
        for sums in sums {
            prop_assert_eq!(&sums, &expected);
        }
    }
}

#[test]
fn every_half_is_read_exactly() {
    for bits in 0..=u16::MAX {
        let (expected, found) = (f16::from_bits(bits).to_f32(), half(bits));
        let same = if expected.is_nan() { found.is_nan() } else { found.to_bits() == expected.to_bits() };
        assert!(same, "{bits:#06x}: {found} instead of {expected}");
    }
}
