//! Log-softmax of rows: y = (x - top) - ln(total), with top the row's largest element and total the sum of exp(x -
//! top).

use super::cross_entropy::top_and_total;
use crate::kernels::cpu::{Blocks, Real, Stored, parallel, simd};

/// Computes y from x, both (rows, width).
pub fn forward<T: Stored>(x: &[T], width: usize, y: &mut [T]) {
    parallel::for_rows(y, width, |first, y| {
        simd::vectorized(
            #[inline(always)]
            || {
                let (mut reading, mut writing) =
                    (Blocks::<T, 1, 0>::new(), Blocks::<T, 1, 1>::new());
                let rows = x[first * width..].chunks_exact(width);
                for (x, y) in rows.zip(y.chunks_exact_mut(width)) {
                    let (top, total) = top_and_total(&mut reading, x);
                    let log_total = total.logarithm();
                    writing.each(
                        [x],
                        [y],
                        #[inline(always)]
                        |_, [x], [y]| {
                            for (y, x) in y.iter_mut().zip(x) {
                                *y = (*x - top) - log_total;
                            }
                        },
                    );
                }
            },
        );
    });
}

/// Computes `dx = dy - softmax(x) sum(dy)`, all (rows, width). It reads x, because y in half precision has few digits.
pub fn backward<T: Stored>(dy: &[T], x: &[T], width: usize, dx: &mut [T]) {
    parallel::for_rows(dx, width, |first, dx| {
        simd::vectorized(
            #[inline(always)]
            || {
                let (mut reading, mut writing) =
                    (Blocks::<T, 1, 0>::new(), Blocks::<T, 2, 1>::new());
                let rows = [dy, x].map(|rows| rows[first * width..].chunks_exact(width));
                let [of_dy, of_x] = rows;
                for ((dy, x), dx) in of_dy.zip(of_x).zip(dx.chunks_exact_mut(width)) {
                    let (top, total) = top_and_total(&mut reading, x);
                    let mut sum = T::Wide::ZERO;
                    reading.each(
                        [dy],
                        [],
                        #[inline(always)]
                        |_, [dy], []| sum += simd::sum(dy),
                    );
                    let share = sum / total;
                    writing.each(
                        [dy, x],
                        [dx],
                        #[inline(always)]
                        |_, [dy, x], [dx]| {
                            for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
                                *dx = *dy - (*x - top).exponential() * share;
                            }
                        },
                    );
                }
            },
        );
    });
}
