//! Matrix multiplication: strided views ([`MatRef`], [`MatMut`]) and products of them.
//!
//! What multiplies is ours: the micro-kernel (`micro_kernel`, which attention calls through `tile`), packing (`pack`),
//! and the loops around them (`packed`, cut into tasks by `cut`). Where that is not faster, the `gemm` crate does
//! (`panels`): by the processor's instructions, found at run time, and the shape. What is done with matrices beside
//! multiplying them is elsewhere.

mod batched;
mod cut;
mod matrix;
mod micro_kernel;
mod pack;
mod packed;
mod packing;
mod panels;
mod scratch;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
pub(crate) mod widen;

use super::Stored;
use crate::probe::parts::{Part, timed};
pub use batched::{Batched, matmul_batched};
pub use matrix::{MatMut, MatRef};
pub(crate) use micro_kernel::prefetch;
use packed::{Band, Factors};
pub use packing::{ProductSizes, packing_bytes};
pub use scratch::reserve_scratch;

/// Whether one multiplication may use every thread, or keeps to its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// All threads of the current rayon pool.
    All,
    /// The calling thread only: for use inside a parallel loop.
    One,
}

/// `c = a b`, or `c += a b` where `accumulate`; c is (a.rows, b.cols), row by row. In half precision products and sums
/// are f32's, and c is rounded once.
///
/// 2 * rows * cols * depth FLOPs. The bits do not depend on the number of threads.
pub fn matmul<T: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T],
    accumulate: bool,
    threads: Threads,
) {
    matmul_sum(
        &[(a, b)],
        MatMut::new(c, a.rows, b.cols),
        accumulate,
        threads,
    );
}

/// `c = a b` in the type computed in, from factors that may be in half precision.
pub fn matmul_wide<T: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T::Wide],
    threads: Threads,
) {
    matmul_sum(&[(a, b)], MatMut::new(c, a.rows, b.cols), false, threads);
}

/// `c = sum of a_i b_i` over the terms, or `c +=` that: c (rows, cols), a_i (rows, depth_i), b_i (depth_i, cols).
///
/// The gradient of an input that several weights share, in one parallel region.
pub fn matmul_sum<T, C>(
    terms: &[(MatRef<'_, T>, MatRef<'_, T>)],
    c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    let [(a, b), ..] = terms else {
        panic!("a sum of no products has no shape");
    };
    assert_eq!([a.rows, b.cols], [c.rows, c.cols], "output");
    let band = Band {
        terms,
        first_column: 0,
    };
    timed(Part::Products, || products(&[band], c, accumulate, threads));
}

/// `c = a [b_0 | b_1 | ..]`, or `c +=` that: the products side by side, c (a.rows, sum of b_i.cols).
///
/// Weights that share their input, in one parallel region.
pub fn matmul_bands<T, C>(
    a: MatRef<'_, T>,
    b: &[MatRef<'_, T>],
    c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    assert_eq!(a.rows, c.rows, "output rows");
    assert_eq!(
        b.iter().map(|b| b.cols).sum::<usize>(),
        c.cols,
        "output columns"
    );
    let terms: Vec<[Factors<'_, T, T>; 1]> = b.iter().map(|b| [(a, *b)]).collect();
    let mut next = 0;
    let bands: Vec<_> = terms
        .iter()
        .map(|terms| {
            let first_column = next;
            next += terms[0].1.cols;
            Band {
                terms,
                first_column,
            }
        })
        .collect();
    timed(Part::Products, || products(&bands, c, accumulate, threads));
}

/// Every band of c, by whatever is faster.
fn products<T, C>(
    bands: &[Band<'_, T, T>],
    mut c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    let wide = T::as_wide(&[]).is_some() && C::as_wide(&[]).is_some();
    if !wide || bands.iter().all(|band| prefers_own_gemm(band.terms)) {
        return packed::product(bands, c, accumulate, threads);
    }
    for band in bands {
        for (i, (a, b)) in band.terms.iter().enumerate() {
            let accumulate = accumulate || i > 0;
            let mut c = c.columns(band.first_column, b.cols);
            match (T::as_wide(a.data), T::as_wide(b.data), c.as_wide()) {
                (Some(wide_a), Some(wide_b), Some(c)) => {
                    panels::product(a.over(wide_a), b.over(wide_b), c, accumulate, threads);
                }
                _ => unreachable!("both are computed in"),
            }
        }
    }
}

/// Whether our own product is faster than the `gemm` crate's: with AVX-512 wherever packing is repaid, which takes
/// longest for a transposed b, by the crate most of all; elsewhere where the crate would pack a from lines that lie
/// whole pages apart, and so compete for a few places in the cache.
fn prefers_own_gemm<T>(terms: &[Factors<'_, T, T>]) -> bool {
    terms.iter().all(|(a, b)| {
        let a_transposed = a.row_stride == 1 && a.col_stride > 1;
        let line_bytes = a.col_stride * size_of::<T>();
        let is_aliased = a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
        wins_as(is_aliased, b.col_stride != 1, [a.rows, a.cols, b.cols])
    })
}

/// As [`prefers_own_gemm`], for factors that lie one line after another.
fn wins_by(sizes: ProductSizes) -> bool {
    let line_bytes = sizes.rows.saturating_mul(sizes.element_bytes);
    let is_aliased = sizes.a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
    let lengths = [sizes.rows, sizes.depth, sizes.cols];
    wins_as(is_aliased, sizes.b_transposed, lengths)
}

const PAGE_BYTES: usize = 4096;

fn wins_as(is_aliased: bool, b_transposed: bool, [rows, depth, cols]: [usize; 3]) -> bool {
    let fewest_rows = if b_transposed { 64 } else { 256 };
    let is_large = rows >= fewest_rows && depth >= 128 && cols >= 128;
    (is_aliased && cols >= 256) || (is_large && micro_kernel::has_avx512())
}
