//! Matmuls of whole matrices, by the processor's bf16 instructions, the crate's own kernel or the `gemm` crate.

use super::choice::prefers_own_gemm;
use super::matrix::{MatMut, MatRef};
use super::threads::Threads;
use super::{bf16, packed, panels};
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::simd::same_type;
use crate::probe::parts::{Part, timed};

/// Computes `c = a b`, or `c += a b` if `accumulate`; c is (a.rows, b.cols), row-major. In half precision, factors are
/// widened to f32, except for bf16 on processors that multiply it directly (which flushes denormals to zero). Sums are
/// f32, and c is rounded once.
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

/// Runs [`matmul`] on a c that may be a band of columns of a wider matrix, and of another type than the factors.
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
    timed(Part::Matmul, || {
        if multiplied_in_bf16(a, b, &mut c, accumulate, threads) {
            return;
        }
        if !prefers_own_gemm(a, b)
            && let (Some(wide_a), Some(wide_b), Some(wide_c)) =
                (T::as_wide(a.data), T::as_wide(b.data), c.as_wide())
        {
            return panels::matmul(a.over(wide_a), b.over(wide_b), wide_c, accumulate, threads);
        }
        packed::matmul(a, b, c, accumulate, threads);
    });
}

/// Computes the matmul with the processor's bf16 instructions if possible; returns whether it did. It does not for
/// other types, without such instructions, and if there is nothing to multiply.
fn multiplied_in_bf16<T: Stored, C: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) -> bool {
    let [Some(a_data), Some(b_data)] = [a.data, b.data].map(same_type::<T, half::bf16>) else {
        return false;
    };
    let (a, b) = (a.over(a_data), b.over(b_data));
    let Some(unit) = bf16::unit().filter(|_| a.rows * a.cols * b.cols > 0) else {
        return false;
    };
    let Some(c) = bf16::Output::new(c, accumulate) else {
        return false;
    };
    // SAFETY: c is borrowed until this returns.
    unsafe { bf16::matmul(unit, a, b, c, threads) };
    true
}
