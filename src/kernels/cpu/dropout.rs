//! Dropout.

use super::{Blocks, Real, Stored, parallel, simd};
use crate::kernels::dropout::{DropoutMask, ELEMENTS_PER_CALL};

/// Computes `y = x / (1 - p)` where an element stays, else 0: x and y in rows of `width`. Backward is the same
/// function, from dy to dx.
pub fn dropout<T: Stored>(x: &[T], mask: &DropoutMask, width: usize, y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    let scale = T::Wide::real(mask.scale());
    // If the width is a multiple of 8, the rows' random half words are contiguous in the stream, and all rows are
    // processed as one. Tasks and blocks begin at multiples of SIDE_BY_SIDE.
    let together = width.is_multiple_of(8);
    let unit = if together { 1 } else { width };
    parallel::for_rows(y, unit, |first, y| {
        let x = &x[first * unit..][..y.len()];
        let (row, column, length) = match together {
            true => (0, first, y.len()),
            false => (first, 0, width),
        };
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = x.chunks(length).zip(y.chunks_mut(length));
                for (row, (x, y)) in (row..).zip(rows) {
                    Blocks::<T, 1, 1>::new().each(
                        [x],
                        [y],
                        #[inline(always)]
                        |start, [x], [y]| {
                            let parts = x
                                .chunks(ELEMENTS_PER_CALL)
                                .zip(y.chunks_mut(ELEMENTS_PER_CALL));
                            for (i, (x, y)) in parts.enumerate() {
                                let stay = mask.kept(row, column + start + i * ELEMENTS_PER_CALL);
                                for ((x, y), stays) in x.iter().zip(y).zip(stay) {
                                    *y = if stays { *x * scale } else { T::Wide::ZERO };
                                }
                            }
                        },
                    );
                }
            },
        );
    });
}
