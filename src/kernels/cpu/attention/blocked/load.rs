//! Rows between a matrix (T, Dh) and scratch, whose rows are whole registers.

use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::{Real, Stored, simd};

/// Rows of x (rows, width) to `to` (rows, to_row), zeros beyond the width.
pub(super) fn rows<T: Stored>(x: &[T], width: usize, to: &mut [T::Wide], to_row: usize) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (x, to) in x.chunks_exact(width).zip(to.chunks_exact_mut(to_row)) {
                let (to, padding) = to.split_at_mut(width);
                T::load(x, to);
                padding.fill(T::Wide::ZERO);
            }
        },
    );
}

/// The first `columns` elements of rows of x (rows, x_row) to `to` (rows, to_row).
pub(super) fn part_of_rows<T: Stored>(
    x: &[T],
    x_row: usize,
    columns: usize,
    to: &mut [T::Wide],
    to_row: usize,
) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (x, to) in x.chunks(x_row).zip(to.chunks_exact_mut(to_row)) {
                T::load(&x[..columns], &mut to[..columns]);
            }
        },
    );
}

/// Rows of x (rows, width), each times its factor, to `to` (rows, to_row), zeros beyond the width.
pub(super) fn scaled_rows<T: Stored>(
    x: &[T],
    width: usize,
    factors: &[T::Wide],
    to: &mut [T::Wide],
    to_row: usize,
) {
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = x.chunks_exact(width).zip(to.chunks_exact_mut(to_row));
            for ((x, to), factor) in rows.zip(factors) {
                let (to, padding) = to.split_at_mut(width);
                T::load(x, to);
                for to in to {
                    *to *= *factor;
                }
                padding.fill(T::Wide::ZERO);
            }
        },
    );
}

/// Rows of `from` (rows, from_row), without what is beyond the width, to x (rows, width).
pub(super) fn store<T: Stored>(from: &[T::Wide], from_row: usize, x: &mut [T], width: usize) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (from, x) in from.chunks_exact(from_row).zip(x.chunks_exact_mut(width)) {
                T::store(&from[..width], x);
            }
        },
    );
}

/// As [`store`]; what rounding takes from the rows goes to `rest` (rows, width), and stays in `from`.
pub(super) fn store_with_rest<T: Stored>(
    from: &mut [T::Wide],
    from_row: usize,
    x: &mut [T],
    rest: &mut [T],
    width: usize,
) {
    store(from, from_row, x, width);
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = from.chunks_exact_mut(from_row).zip(x.chunks_exact(width));
            for ((from, x), rest) in rows.zip(rest.chunks_exact_mut(width)) {
                let parts = from[..width].chunks_mut(COLUMNS).zip(x.chunks(COLUMNS));
                for ((from, x), rest) in parts.zip(rest.chunks_mut(COLUMNS)) {
                    let mut rounded = [T::Wide::ZERO; COLUMNS];
                    T::load(x, &mut rounded[..x.len()]);
                    for (from, rounded) in from.iter_mut().zip(rounded) {
                        *from -= rounded;
                    }
                    T::store(from, rest);
                }
            }
        },
    );
}
