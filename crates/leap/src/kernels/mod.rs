//! The loops that time goes into, compiled twice: for every processor of the target, and on x86-64 for those with AVX2,
//! FMA and F16C, which are found at run time. The published wheel is built for the oldest x86-64, whose vectors are half
//! as wide and which has neither a fused multiply-add nor half precision. Both forms are the same source over groups of
//! eight values, so they differ by rounding alone.

mod dot;
mod gram;
mod pool;
#[cfg(test)]
mod tests;
mod tile;

pub(crate) use dot::{dot_bf16, dot_f16, dot_f32, dot_f64};
pub(crate) use gram::Panels;
pub(crate) use pool::add_halves;
pub(crate) use tile::{Tile, deflate, multiply};

/// Values in a group: one register of AVX2 in f32, two in f64.
const WIDTH: usize = 8;

type Group<T> = [T; WIDTH];

/// f32 or f64 as the kernels use it.
pub(crate) trait Scalar:
    Copy + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::Sub<Output = Self>
{
    const ZERO: Self;

    /// a * b + c with one rounding.
    ///
    /// # Safety
    /// The processor must have AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    unsafe fn fused(a: Group<Self>, b: Group<Self>, c: Group<Self>) -> Group<Self>;
}

/// What a kernel may ask of the processor. A value of the type is the proof that it may.
trait Machine: Copy {
    /// Whether a group of f32 is one register.
    const WIDE: bool;

    /// a * b + c.
    fn multiply_add<T: Scalar>(self, a: Group<T>, b: Group<T>, c: Group<T>) -> Group<T>;

    /// From the bits of half precision, exactly.
    fn halves(self, bits: &Group<u16>) -> Group<f32>;

    /// From the bits of bfloat16, exactly.
    fn brains(self, bits: &Group<u16>) -> Group<f32>;
}

/// Any processor.
#[derive(Clone, Copy)]
struct Portable;

impl Machine for Portable {
    const WIDE: bool = false;

    #[inline(always)]
    fn multiply_add<T: Scalar>(self, a: Group<T>, b: Group<T>, mut c: Group<T>) -> Group<T> {
        for i in 0..WIDTH {
            c[i] = a[i] * b[i] + c[i];
        }
        c
    }

    #[inline(always)]
    fn halves(self, bits: &Group<u16>) -> Group<f32> {
        let mut out = [0.0; WIDTH];
        for i in 0..WIDTH {
            out[i] = half(bits[i]);
        }
        out
    }

    #[inline(always)]
    fn brains(self, bits: &Group<u16>) -> Group<f32> {
        let mut out = [0.0; WIDTH];
        for i in 0..WIDTH {
            out[i] = f32::from_bits(u32::from(bits[i]) << 16);
        }
        out
    }
}

/// One half-precision value without a branch: the exponent is moved by a product with 2^112, which also makes
/// subnormals right; an exponent of all ones stands for an infinity or NaN, where one more reaches the sign's place.
#[inline(always)]
fn half(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = (((bits & 0x7fff) + 0x400) >> 15) * 0x7f80_0000;
    f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
}

/// A loop over data that is compiled for each kind of machine.
trait Kernel {
    type Out;

    /// Must be `#[inline(always)]`, so that it is compiled for the machine that calls it.
    fn run<M: Machine>(self, machine: M) -> Self::Out;
}

#[cfg(not(target_arch = "x86_64"))]
impl Scalar for f32 {
    const ZERO: Self = 0.0;
}

#[cfg(not(target_arch = "x86_64"))]
impl Scalar for f64 {
    const ZERO: Self = 0.0;
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn dispatch<K: Kernel>(kernel: K) -> K::Out {
    kernel.run(Portable)
}

#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
use x86::dispatch;
