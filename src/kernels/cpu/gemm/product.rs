//! Products of whole matrices, by our own kernel or the `gemm` crate.

use super::choice::prefers_own_gemm;
use super::matrix::{MatMut, MatRef};
use super::threads::Threads;
use super::{packed, panels};
use crate::kernels::cpu::Stored;
use crate::probe::parts::{Part, timed};

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
    matmul_to(a, b, MatMut::new(c, a.rows, b.cols), accumulate, threads);
}

/// `c = a b` in the type computed in, from factors that may be in half precision.
pub fn matmul_wide<T: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T::Wide],
    threads: Threads,
) {
    matmul_to(a, b, MatMut::new(c, a.rows, b.cols), false, threads);
}

/// As [`matmul`], to a c that may be a band of the columns of a wider matrix, in another type than the factors'.
pub fn matmul_to<T, C>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    mut c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    timed(Part::Products, || {
        if !prefers_own_gemm(a, b)
            && let (Some(wide_a), Some(wide_b), Some(wide_c)) =
                (T::as_wide(a.data), T::as_wide(b.data), c.as_wide())
        {
            return panels::product(a.over(wide_a), b.over(wide_b), wide_c, accumulate, threads);
        }
        packed::product(a, b, c, accumulate, threads);
    });
}
