//! Bias of a linear layer, and its gradient.

use crate::kernels::cpu::{Blocks, Stored, parallel, simd};

/// Fills every row of `y` (rows, width) with `bias` (width). The matmul is then added to y, which in half precision
/// rounds once more.
pub fn fill<T: Stored>(bias: &[T], y: &mut [T]) {
    let width = bias.len();
    parallel::for_rows(y, width, |_, y| {
        for row in y.chunks_exact_mut(width) {
            row.copy_from_slice(bias);
        }
    });
}

/// Computes `db` (width), the sum of the rows of `dy` (rows, width), in a fixed order; adds it to `db` if `adds`.
pub fn gradient<T: Stored>(dy: &[T], db: &mut [T::Wide], adds: bool) {
    let width = db.len();
    let rows = dy.len().checked_div(width).unwrap_or(0);
    parallel::sum_rows(db, rows, adds, |rows, db| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                for row in rows {
                    reading.each(
                        [&dy[row * width..][..width]],
                        [],
                        #[inline(always)]
                        |start, [dy], []| {
                            for (db, dy) in db[start..].iter_mut().zip(dy) {
                                *db += *dy;
                            }
                        },
                    );
                }
            },
        );
    });
}
