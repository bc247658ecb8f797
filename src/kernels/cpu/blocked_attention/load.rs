//! Rows between a matrix (T, Dh) and scratch, whose rows are whole registers.

use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::{Real, simd};

/// Rows of x (rows, width) to `to` (rows, to_row), zeros beyond the width.
pub(super) fn rows<T: Real>(x: &[T], width: usize, to: &mut [T], to_row: usize) {
    for (x, to) in x.chunks_exact(width).zip(to.chunks_exact_mut(to_row)) {
        let (to, padding) = to.split_at_mut(width);
        to.copy_from_slice(x);
        padding.fill(T::ZERO);
    }
}

/// Rows of x (rows, width) as columns: to (width, to_row), zeros up to whole registers of rows.
pub(super) fn columns<T: Real>(x: &[T], width: usize, to: &mut [T], to_row: usize) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (block, x) in x.chunks(COLUMNS * width).enumerate() {
                let rows = x.len() / width;
                for column in 0..width {
                    let to = &mut to[column * to_row + block * COLUMNS..][..COLUMNS];
                    for (row, to) in to.iter_mut().enumerate() {
                        *to = if row < rows {
                            x[row * width + column]
                        } else {
                            T::ZERO
                        };
                    }
                }
            }
        },
    );
}

/// Rows of x (rows, width), each times its factor, to `to` (rows, to_row), zeros beyond the width.
pub(super) fn scaled_rows<T: Real>(
    x: &[T],
    width: usize,
    factors: &[T],
    to: &mut [T],
    to_row: usize,
) {
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = x.chunks_exact(width).zip(to.chunks_exact_mut(to_row));
            for ((x, to), factor) in rows.zip(factors) {
                let (to, padding) = to.split_at_mut(width);
                for (to, x) in to.iter_mut().zip(x) {
                    *to = *x * *factor;
                }
                padding.fill(T::ZERO);
            }
        },
    );
}

/// Rows of `from` (rows, from_row), without what is beyond the width, to x (rows, width).
pub(super) fn store<T: Real>(from: &[T], from_row: usize, x: &mut [T], width: usize) {
    for (from, x) in from.chunks_exact(from_row).zip(x.chunks_exact_mut(width)) {
        x.copy_from_slice(&from[..width]);
    }
}
