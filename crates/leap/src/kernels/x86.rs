//! AVX2, FMA and F16C. Every function that needs them is reached with a [`Wide`] in hand, which is made only where the
//! processor has them.

use std::arch::x86_64::{
    __m128i, __m256, __m256d, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_pd, _mm256_fmadd_ps,
    _mm256_slli_epi32,
};
use std::mem::transmute;

use super::{Group, Kernel, Machine, Portable, Scalar};

/// The proof that the processor has AVX2, FMA and F16C: made only by [`Wide::find`].
#[derive(Clone, Copy)]
struct Wide(());

impl Wide {
    /// The standard library caches what it found.
    #[inline(always)]
    fn find() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

// SAFETY, of every `transmute` below: both sides are the same numbers in the same order, and every pattern of bits is
// valid on both.

impl Scalar for f32 {
    const ZERO: Self = 0.0;

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn fused(a: Group<Self>, b: Group<Self>, c: Group<Self>) -> Group<Self> {
        let [a, b, c] = [a, b, c].map(|v| unsafe { transmute::<Group<f32>, __m256>(v) });
        unsafe { transmute(_mm256_fmadd_ps(a, b, c)) }
    }
}

impl Scalar for f64 {
    const ZERO: Self = 0.0;

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn fused(a: Group<Self>, b: Group<Self>, c: Group<Self>) -> Group<Self> {
        let [a, b, c] = [a, b, c].map(|v| unsafe { transmute::<Group<f64>, [__m256d; 2]>(v) });
        unsafe { transmute([_mm256_fmadd_pd(a[0], b[0], c[0]), _mm256_fmadd_pd(a[1], b[1], c[1])]) }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn halves(bits: Group<u16>) -> Group<f32> {
    unsafe { transmute(_mm256_cvtph_ps(transmute::<Group<u16>, __m128i>(bits))) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn brains(bits: Group<u16>) -> Group<f32> {
    let wide = _mm256_cvtepu16_epi32(unsafe { transmute::<Group<u16>, __m128i>(bits) });
    unsafe { transmute(_mm256_slli_epi32::<16>(wide)) }
}

// SAFETY, of every call below: a `Wide` exists only where the processor has the features.

impl Machine for Wide {
    const WIDE: bool = true;

    #[inline(always)]
    fn multiply_add<T: Scalar>(self, a: Group<T>, b: Group<T>, c: Group<T>) -> Group<T> {
        unsafe { T::fused(a, b, c) }
    }

    #[inline(always)]
    fn halves(self, bits: &Group<u16>) -> Group<f32> {
        unsafe { halves(*bits) }
    }

    #[inline(always)]
    fn brains(self, bits: &Group<u16>) -> Group<f32> {
        unsafe { brains(*bits) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn wide<K: Kernel>(kernel: K, machine: Wide) -> K::Out {
    kernel.run(machine)
}

#[inline]
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Out {
    match Wide::find() {
        Some(machine) => unsafe { wide(kernel, machine) },
        None => kernel.run(Portable),
    }
}
