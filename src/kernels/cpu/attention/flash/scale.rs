//! Multiplies and caps in place.

use crate::kernels::cpu::{Lanes, simd};

/// x times a factor.
pub(super) fn multiply_by<T: Lanes>(x: &mut [T], factor: T) {
    simd::vectorized(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x *= factor),
    );
}

/// x becomes cap tanh(x / cap).
pub(super) fn cap_by<T: Lanes>(x: &mut [T], cap: T) {
    simd::vectorized(
        #[inline(always)]
        || {
            x.iter_mut()
                .for_each(|x| *x = cap * (*x / cap).hyperbolic_tangent());
        },
    );
}

/// x times the factors, and 0 where one is 0, whatever x is.
pub(super) fn multiply<T: Lanes>(x: &mut [T], factors: &[T]) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (x, factor) in x.iter_mut().zip(factors) {
                *x = if *factor == T::ZERO {
                    T::ZERO
                } else {
                    *x * *factor
                };
            }
        },
    );
}
