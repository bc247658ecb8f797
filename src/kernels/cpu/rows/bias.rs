//! A bias under a product, and its gradient.

use super::each::sum_rows;
use crate::kernels::cpu::{Stored, parallel};

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

/// `db` (width) is the sum of the rows of `dy` (rows, width), in a fixed order.
pub fn gradient<T: Stored>(dy: &[T], db: &mut [T::Wide]) {
    sum_rows(
        [dy],
        db,
        #[inline(always)]
        |_, [dy], db| {
            for (db, dy) in db.iter_mut().zip(dy) {
                *db += *dy;
            }
        },
    );
}
