//! The dot product of a row in its own format with an f32 weight. Sums run in 32 independent f32 lanes, which is what
//! lets the compiler use vector registers without reordering a sum, and end in f64.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::rows::Row;

const LANES: usize = 32;
/// f16 is converted in blocks of this many values, which stay in the first cache level.
const BLOCK: usize = 256;

/// Sum of `row[i] * weight[i]` over the shorter of both.
pub(super) fn dot(row: Row, weight: &[f32]) -> f64 {
    match row {
        Row::F32(x) => lanes(x, weight, |v| v),
        Row::Bf16(x) => lanes(x, weight, widen),
        Row::F16(x) => halves(x, weight),
        Row::F64(x) => doubles(x, weight),
    }
}

#[inline(always)]
fn widen(v: bf16) -> f32 {
    f32::from_bits(u32::from(v.to_bits()) << 16)
}

#[inline(always)]
fn lanes<T: Copy>(x: &[T], w: &[f32], load: impl Fn(T) -> f32) -> f64 {
    let n = x.len().min(w.len());
    let (x, x_rest) = x[..n].as_chunks::<LANES>();
    let (w, w_rest) = w[..n].as_chunks::<LANES>();
    let mut acc = [0f32; LANES];
    for (x, w) in x.iter().zip(w) {
        for lane in 0..LANES {
            acc[lane] += load(x[lane]) * w[lane];
        }
    }
    // Apart from the lanes, which a loop of unknown length would force out of registers.
    let rest: f64 = x_rest.iter().zip(w_rest).map(|(&x, &w)| f64::from(load(x)) * f64::from(w)).sum();
    acc.iter().map(|&v| f64::from(v)).sum::<f64>() + rest
}

fn halves(x: &[f16], w: &[f32]) -> f64 {
    let mut block = [0f32; BLOCK];
    let mut sum = 0.0;
    for (x, w) in x.chunks(BLOCK).zip(w.chunks(BLOCK)) {
        let block = &mut block[..x.len()];
        x.convert_to_f32_slice(block);
        sum += lanes(block, w, |v| v);
    }
    sum
}

fn doubles(x: &[f64], w: &[f32]) -> f64 {
    let n = x.len().min(w.len());
    let (x, x_rest) = x[..n].as_chunks::<LANES>();
    let (w, w_rest) = w[..n].as_chunks::<LANES>();
    let mut acc = [0f64; LANES];
    for (x, w) in x.iter().zip(w) {
        for lane in 0..LANES {
            acc[lane] += x[lane] * f64::from(w[lane]);
        }
    }
    let rest: f64 = x_rest.iter().zip(w_rest).map(|(&x, &w)| x * f64::from(w)).sum();
    acc.iter().sum::<f64>() + rest
}
