//! Dot products of a row in its own format with an f32 weight: independent sums, which is what lets vector registers be
//! used without reordering any of them, added up in f64.

use super::{Group, Kernel, Machine, Scalar, WIDTH, dispatch};

/// Sum of `x[i] * w[i]` over the shorter of both.
pub(crate) fn dot_f32(x: &[f32], w: &[f32]) -> f64 {
    dispatch(Dot::<Single> { x, w })
}

/// As [`dot_f32`], in double precision.
pub(crate) fn dot_f64(x: &[f64], w: &[f32]) -> f64 {
    dispatch(Dot::<Double> { x, w })
}

/// As [`dot_f32`], from the bits of half precision.
pub(crate) fn dot_f16(x: &[u16], w: &[f32]) -> f64 {
    dispatch(Dot::<Half> { x, w })
}

/// As [`dot_f32`], from the bits of bfloat16.
pub(crate) fn dot_bf16(x: &[u16], w: &[f32]) -> f64 {
    dispatch(Dot::<Brain> { x, w })
}

/// How a row is stored and summed.
pub(super) trait Format {
    type Stored: Copy + Default;
    type Sum: Scalar + From<f32> + Into<f64>;

    fn load<M: Machine>(machine: M, x: &Group<Self::Stored>) -> Group<Self::Sum>;

    #[inline(always)]
    fn weights(w: &Group<f32>) -> Group<Self::Sum> {
        let mut out = [Self::Sum::ZERO; WIDTH];
        for i in 0..WIDTH {
            out[i] = w[i].into();
        }
        out
    }
}

pub(super) struct Single;
pub(super) struct Double;
pub(super) struct Half;
pub(super) struct Brain;

impl Format for Single {
    type Stored = f32;
    type Sum = f32;

    #[inline(always)]
    fn load<M: Machine>(_: M, x: &Group<f32>) -> Group<f32> {
        *x
    }
}

impl Format for Double {
    type Stored = f64;
    type Sum = f64;

    #[inline(always)]
    fn load<M: Machine>(_: M, x: &Group<f64>) -> Group<f64> {
        *x
    }
}

impl Format for Half {
    type Stored = u16;
    type Sum = f32;

    #[inline(always)]
    fn load<M: Machine>(machine: M, x: &Group<u16>) -> Group<f32> {
        machine.halves(x)
    }
}

impl Format for Brain {
    type Stored = u16;
    type Sum = f32;

    #[inline(always)]
    fn load<M: Machine>(machine: M, x: &Group<u16>) -> Group<f32> {
        machine.brains(x)
    }
}

pub(super) struct Dot<'a, F: Format> {
    pub x: &'a [F::Stored],
    pub w: &'a [f32],
}

impl<F: Format> Kernel for Dot<'_, F> {
    type Out = f64;

    #[inline(always)]
    fn run<M: Machine>(self, machine: M) -> f64 {
        // As many groups of sums as hide the latency of a multiply-add, or as leave room in registers.
        if M::WIDE { self.sum::<M, 8>(machine) } else { self.sum::<M, 4>(machine) }
    }
}

impl<F: Format> Dot<'_, F> {
    #[inline(always)]
    fn sum<M: Machine, const GROUPS: usize>(self, machine: M) -> f64 {
        let n = self.x.len().min(self.w.len());
        let (x, x_rest) = self.x[..n].as_chunks::<WIDTH>();
        let (w, w_rest) = self.w[..n].as_chunks::<WIDTH>();
        let mut groups = [[F::Sum::ZERO; WIDTH]; GROUPS];
        let (x, x_few) = x.as_chunks::<GROUPS>();
        let (w, w_few) = w.as_chunks::<GROUPS>();
        for (x, w) in x.iter().zip(w) {
            for i in 0..GROUPS {
                groups[i] = machine.multiply_add(F::load(machine, &x[i]), F::weights(&w[i]), groups[i]);
            }
        }
        let mut last = [F::Sum::ZERO; WIDTH];
        for (x, w) in x_few.iter().zip(w_few) {
            last = machine.multiply_add(F::load(machine, x), F::weights(w), last);
        }
        let (mut x, mut w) = ([F::Stored::default(); WIDTH], [0.0; WIDTH]);
        x[..x_rest.len()].copy_from_slice(x_rest);
        w[..w_rest.len()].copy_from_slice(w_rest);
        last = machine.multiply_add(F::load(machine, &x), F::weights(&w), last);
        let mut sums = [0f64; WIDTH];
        for group in groups.into_iter().chain([last]) {
            for i in 0..WIDTH {
                sums[i] += group[i].into();
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        ((a + e) + (b + f)) + ((c + g) + (d + h))
    }
}
