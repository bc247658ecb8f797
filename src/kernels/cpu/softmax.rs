//! Softmax of scaled, masked scores: p = softmax(scale * x) over the keys that the mask leaves.

use super::{Real, parallel, simd};
use crate::kernels::Mask;

/// `p` from scores `x`, both (batch, queries, keys). Masked places and rows without a visible key are 0.
pub fn forward<T: Real>(x: &[T], queries: usize, keys: usize, scale: f64, mask: Mask, p: &mut [T]) {
    let scale = T::real(scale);
    parallel::for_rows(p, keys, |first, p| {
        let x = &x[first * keys..first * keys + p.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = p.chunks_exact_mut(keys).zip(x.chunks_exact(keys));
                for (row, (p, x)) in rows.enumerate() {
                    let visible = mask.visible((first + row) % queries, queries, keys).end;
                    let (p, hidden) = p.split_at_mut(visible);
                    hidden.fill(T::ZERO);
                    for (p, x) in p.iter_mut().zip(x) {
                        *p = *x * scale; // first, so that a negative scale is right too
                    }
                    let top = simd::max(p);
                    for p in p.iter_mut() {
                        *p = (*p - top).exponential();
                    }
                    let share = T::ONE / simd::sum(p);
                    for p in p.iter_mut() {
                        *p *= share;
                    }
                }
            },
        );
    });
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
    let scale = T::real(scale);
    parallel::for_rows(dx, keys, |first, dx| {
        let range = first * keys..first * keys + dx.len();
        let (dp, p) = (&dp[range.clone()], &p[range]);
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = dx.chunks_exact_mut(keys).zip(dp.chunks_exact(keys));
                for (row, ((dx, dp), p)) in rows.zip(p.chunks_exact(keys)).enumerate() {
                    let visible = mask.visible((first + row) % queries, queries, keys).end;
                    let (dx, hidden) = dx.split_at_mut(visible);
                    hidden.fill(T::ZERO);
                    let inner = simd::dot(&p[..visible], &dp[..visible]);
                    for ((dx, dp), p) in dx.iter_mut().zip(dp).zip(p) {
                        *dx = *p * (*dp - inner) * scale;
                    }
                }
            },
        );
    });
}
