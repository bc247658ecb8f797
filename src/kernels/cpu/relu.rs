//! relu(x) = max(x, 0).

use super::{Blocks, Real, Stored, parallel, simd};

/// `y = max(x, 0)`; a NaN stays one.
pub fn forward<T: Stored>(x: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 1, 1>::new().each(
                    [x],
                    [y],
                    #[inline(always)]
                    |_, [x], [y]| {
                        for (y, x) in y.iter_mut().zip(x) {
                            *y = if *x < T::Wide::ZERO {
                                T::Wide::ZERO
                            } else {
                                *x
                            };
                        }
                    },
                );
            },
        );
    });
}

/// `dx = 0` where the output was 0, else dy: at an input of 0 nothing passes, at NaN everything, as in PyTorch.
pub fn backward<T: Stored>(dy: &[T], y: &[T], dx: &mut [T]) {
    parallel::for_rows(dx, 1, |first, dx| {
        let range = first..first + dx.len();
        let (dy, y) = (&dy[range.clone()], &y[range]);
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 2, 1>::new().each(
                    [dy, y],
                    [dx],
                    #[inline(always)]
                    |_, [dy, y], [dx]| {
                        for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
                            *dx = if *y <= T::Wide::ZERO {
                                T::Wide::ZERO
                            } else {
                                *dy
                            };
                        }
                    },
                );
            },
        );
    });
}
