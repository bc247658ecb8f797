//! A bias under a product, and its gradient.

use crate::kernels::cpu::{Blocks, Stored, parallel, simd};

/// Every row of `y` (rows, width) is `bias` (width), for a product to be added to, which rounds once more in half
/// precision.
pub fn fill<T: Stored>(bias: &[T], y: &mut [T]) {
    let width = bias.len();
    parallel::for_rows(y, width, |_, y| {
        for row in y.chunks_exact_mut(width) {
            row.copy_from_slice(bias);
        }
    });
}

/// Computes `db` (width), the sum of the rows of `dy` (rows, width), or adds it, in a fixed order.
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
