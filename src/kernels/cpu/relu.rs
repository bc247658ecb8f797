//! relu(x) = max(x, 0).

use super::{Real, parallel, simd};

/// `y = max(x, 0)`; a NaN stays one.
pub fn forward<T: Real>(x: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let x = &x[first..];
        simd::vectorized(
            #[inline(always)]
            || {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = if *x < T::ZERO { T::ZERO } else { *x };
                }
            },
        );
    });
}

/// `dx = 0` where the output was 0, else dy: at an input of 0 nothing passes, at NaN everything, as in PyTorch.
pub fn backward<T: Real>(dy: &[T], y: &[T], dx: &mut [T]) {
    parallel::for_rows(dx, 1, |first, dx| {
        let (dy, y) = (&dy[first..], &y[first..]);
        simd::vectorized(
            #[inline(always)]
            || {
                for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
                    *dx = if *y <= T::ZERO { T::ZERO } else { *dy };
                }
            },
        );
    });
}
