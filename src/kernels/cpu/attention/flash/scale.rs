//! In-place scaling and soft capping of scores.

use crate::kernels::cpu::{Lanes, simd};

/// Multiplies x by a factor.
pub(super) fn multiply_by<T: Lanes>(x: &mut [T], factor: T) {
    simd::vectorized(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x *= factor),
    );
}

/// Multiplies the first `columns` elements of each row of `width` by a factor.
pub(super) fn multiply_rows<T: Lanes>(x: &mut [T], width: usize, columns: usize, factor: T) {
    x.chunks_mut(width)
        .for_each(|row| multiply_by(&mut row[..columns], factor));
}

/// Replaces x by cap tanh(x / cap).
pub(super) fn cap_by<T: Lanes>(x: &mut [T], cap: T) {
    simd::vectorized(
        #[inline(always)]
        || {
            x.iter_mut()
                .for_each(|x| *x = cap * (*x / cap).hyperbolic_tangent());
        },
    );
}

/// Multiplies x elementwise by `factors`; where a factor is 0 the result is 0, even for NaN.
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
