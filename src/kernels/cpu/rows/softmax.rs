//! Softmax of scaled, masked scores: p = softmax(scale * x) over the keys that the mask leaves.

pub use super::half_softmax::backward_from_scores;

use super::half_softmax::{self, Rows};
use crate::kernels::Mask;
use crate::kernels::cpu::gemm::Threads;
use crate::kernels::cpu::{Real, Stored, parallel, simd};
use crate::probe::parts::{Part, timed};

/// `p` from scores `x`, both (batch, queries, keys). Masked places and rows without a visible key are 0.
pub fn forward<T: Stored>(
    x: &[T],
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
    p: &mut [T],
) {
    let rows = |first: usize, p: &mut [T]| {
        let x = &x[first * keys..first * keys + p.len()];
        match (T::as_wide(x), T::as_wide_mut(p)) {
            (Some(x), Some(p)) => {
                p.copy_from_slice(x);
                forward_rows(p, first, queries, keys, scale, mask);
            }
            _ => {
                let scale = T::Wide::real(scale);
                let rows = Rows {
                    first,
                    queries,
                    keys,
                    scale,
                    mask,
                };
                half_softmax::forward_rows(rows, x, p);
            }
        }
    };
    timed(Part::Softmax, || parallel::for_rows(p, keys, rows));
}

/// As [`forward`], from the scores in `p`; with `log(sum(exp(scale * x)))` of every row in `lse`, unless that is empty.
/// Rows without a visible key have -inf there.
pub fn forward_in_place<T: Real>(
    p: &mut [T],
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
    lse: &mut [T],
    threads: Threads,
) {
    let rows = |first: usize, p: &mut [T], lse: &mut [T]| {
        let rows = || {
            forward_visible(
                p,
                keys,
                scale,
                #[inline(always)]
                |row| mask.visible((first + row) % queries, queries, keys).end,
                #[inline(always)]
                |row, top, sum| {
                    if let Some(lse) = lse.get_mut(row) {
                        *lse = top + sum.logarithm();
                    }
                },
            );
        };
        timed(Part::Softmax, rows);
    };
    match threads {
        Threads::One => rows(0, p, lse),
        Threads::All if lse.is_empty() => {
            parallel::for_rows(p, keys, |first, p| rows(first, p, &mut []));
        }
        Threads::All => parallel::for_rows2(p, keys, lse, 1, rows),
    }
}

/// `dx = scale * p (dp - sum(dp p))` over the visible keys, 0 elsewhere.
pub fn backward<T: Real>(
    dp: &[T],
    p: &[T],
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
    dx: &mut [T],
) {
    let rows = |first: usize, dx: &mut [T]| {
        let range = first * keys..first * keys + dx.len();
        dx.copy_from_slice(&dp[range.clone()]);
        backward_rows(dx, &p[range], first, queries, keys, scale, mask);
    };
    timed(Part::Softmax, || parallel::for_rows(dx, keys, rows));
}

/// As [`backward`], from the gradient in `dx`.
pub fn backward_in_place<T: Real>(
    dx: &mut [T],
    p: &[T],
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
    threads: Threads,
) {
    match threads {
        Threads::One => backward_rows(dx, p, 0, queries, keys, scale, mask),
        Threads::All => parallel::for_rows(dx, keys, |first, dx| {
            let p = &p[first * keys..first * keys + dx.len()];
            backward_rows(dx, p, first, queries, keys, scale, mask);
        }),
    }
}

/// Whole rows, of which the first is row `first` of the batch.
pub(in crate::kernels::cpu) fn forward_rows<T: Real>(
    p: &mut [T],
    first: usize,
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
) {
    let rows = || {
        forward_visible(
            p,
            keys,
            scale,
            #[inline(always)]
            |row| mask.visible((first + row) % queries, queries, keys).end,
            #[inline(always)]
            |_, _, _| (),
        );
    };
    timed(Part::Softmax, rows);
}

/// Rows of `width` elements, of which row i's first `visible(i)` are scores; the others become 0. `done(i, top, sum)`
/// is called with the largest scaled score of row i and the sum of the exponentials relative to it.
#[inline(always)]
fn forward_visible<T: Real>(
    p: &mut [T],
    width: usize,
    scale: f64,
    visible: impl Fn(usize) -> usize,
    mut done: impl FnMut(usize, T, T),
) {
    let scale = T::real(scale);
    simd::vectorized(
        #[inline(always)]
        || {
            for (row, p) in p.chunks_exact_mut(width).enumerate() {
                let (p, hidden) = p.split_at_mut(visible(row));
                hidden.fill(T::ZERO);
                for p in p.iter_mut() {
                    *p *= scale; // before the maximum, so that a negative scale is right too
                }
                let top = simd::max(p);
                for p in p.iter_mut() {
                    *p = (*p - top).exponential();
                }
                let sum = simd::sum(p);
                done(row, top, sum);
                let inv_sum = T::ONE / sum;
                for p in p.iter_mut() {
                    *p *= inv_sum;
                }
            }
        },
    );
}

/// Whole rows, of which the first is row `first` of the batch; `dx` holds dp.
pub(in crate::kernels::cpu) fn backward_rows<T: Real>(
    dx: &mut [T],
    p: &[T],
    first: usize,
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
) {
    let rows = || {
        backward_visible(
            dx,
            p,
            keys,
            scale,
            #[inline(always)]
            |row| mask.visible((first + row) % queries, queries, keys).end,
        )
    };
    timed(Part::Softmax, rows);
}

/// Rows as in [`forward_visible`]; `dx` holds dp.
#[inline(always)]
pub(super) fn backward_visible<T: Real>(
    dx: &mut [T],
    p: &[T],
    width: usize,
    scale: f64,
    visible: impl Fn(usize) -> usize,
) {
    let scale = T::real(scale);
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = dx.chunks_exact_mut(width).zip(p.chunks_exact(width));
            for (row, (dx, p)) in rows.enumerate() {
                let visible = visible(row);
                let (dx, hidden) = dx.split_at_mut(visible);
                hidden.fill(T::ZERO);
                let p = &p[..visible];
                let inner = simd::dot(p, dx);
                for (dx, p) in dx.iter_mut().zip(p) {
                    *dx = *p * (*dx - inner) * scale;
                }
            }
        },
    );
}
