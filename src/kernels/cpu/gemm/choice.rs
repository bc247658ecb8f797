//! Which computes a product: our own kernel or the `gemm` crate.

use super::matrix::MatRef;
use super::micro_kernel::has_avx512;

/// A product by its sizes: (rows, depth) times (depth, cols).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductSizes {
    /// Of a and c.
    pub rows: usize,
    /// Columns of a, rows of b.
    pub depth: usize,
    /// Of b and c.
    pub cols: usize,
    /// a lies in memory as (depth, rows).
    pub a_transposed: bool,
    /// b lies in memory as (cols, depth).
    pub b_transposed: bool,
    /// Bytes an element of a and b.
    pub element_bytes: usize,
}

/// Whether our own product is faster than the `gemm` crate's: with AVX-512 wherever packing is repaid, which takes
/// longest for a transposed b, by the crate most of all; elsewhere where the crate would pack a from lines that lie
/// whole pages apart, and so compete for a few places in the cache.
pub(super) fn prefers_own_gemm<T>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> bool {
    let a_transposed = a.row_stride == 1 && a.col_stride > 1;
    let line_bytes = a.col_stride * size_of::<T>();
    let is_aliased = a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
    prefers(is_aliased, b.col_stride != 1, [a.rows, a.cols, b.cols])
}

/// As [`prefers_own_gemm`], for factors that lie one line after another.
pub(super) fn prefers_own_gemm_by(sizes: ProductSizes) -> bool {
    let line_bytes = sizes.rows.saturating_mul(sizes.element_bytes);
    let is_aliased = sizes.a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
    let lengths = [sizes.rows, sizes.depth, sizes.cols];
    prefers(is_aliased, sizes.b_transposed, lengths)
}

const PAGE_BYTES: usize = 4096;

fn prefers(is_aliased: bool, b_transposed: bool, [rows, depth, cols]: [usize; 3]) -> bool {
    let fewest_rows = if b_transposed { 64 } else { 256 };
    let is_large = rows >= fewest_rows && depth >= 128 && cols >= 128;
    (is_aliased && cols >= 256) || (is_large && has_avx512())
}
