//! Softmax of scaled, masked scores: p = softmax(scale * x) over the visible keys.

pub use super::half_softmax::backward_from_scores;

use super::half_softmax::{self, Rows};
use crate::kernels::Mask;
use crate::kernels::attention::{KeyRanges, PerScore};
use crate::kernels::cpu::{Real, Stored, parallel, simd};
use crate::probe::parts::{Part, timed};
use std::ops::Range;

/// Computes `p` from scores `x`, both (batch, queries, keys). Hidden places and rows without a visible key are 0.
pub fn forward<T: Stored>(x: &[T], seen: KeyRanges<'_>, scale: f64, p: &mut [T]) {
    let keys = seen.keys;
    let rows = |first: usize, p: &mut [T]| {
        let x = &x[first * keys..first * keys + p.len()];
        match (T::as_wide(x), T::as_wide_mut(p)) {
            (Some(x), Some(p)) => {
                p.copy_from_slice(x);
                forward_rows(p, first, seen, scale);
            }
            _ => {
                let scale = T::Wide::real(scale);
                half_softmax::forward_rows(Rows { first, seen, scale }, x, p);
            }
        }
    };
    timed(Part::Softmax, || parallel::for_rows(p, keys, rows));
}

/// Computes [`forward`] in heads (B, H, Tq, Tk) of which `visible` hides elements too. Rows whose visible scores are
/// all -inf are 0.
pub fn forward_of_heads<T: Real>(x: &[T], seen: &HeadRows<'_>, scale: f64, p: &mut [T]) {
    let (keys, scale) = (seen.keys, T::real(scale));
    let rows = |first: usize, p: &mut [T]| {
        let x = &x[first * keys..first * keys + p.len()];
        p.copy_from_slice(x);
        for (row, p) in p.chunks_exact_mut(keys).enumerate() {
            let (range, is_hidden) = seen.of_row(first + row);
            let p = visible_part(p, range.clone(), T::ZERO);
            for (key, p) in range.zip(&mut *p) {
                *p = match is_hidden(key) {
                    true => T::NEG_INFINITY,
                    false => *p * scale,
                };
            }
            if p.iter().all(|score| *score == T::NEG_INFINITY) {
                p.fill(T::ZERO);
                continue;
            }
            simd::vectorized(
                #[inline(always)]
                || {
                    let top = simd::max(p);
                    for p in p.iter_mut() {
                        *p = (*p - top).exponential();
                    }
                    let inv_sum = T::ONE / simd::sum(p);
                    for p in p.iter_mut() {
                        *p *= inv_sum;
                    }
                },
            );
        }
    };
    timed(Part::Softmax, || parallel::for_rows(p, keys, rows));
}

/// Computes dx of [`forward_of_heads`], as [`backward`] does. A NaN in a hidden dp has no effect.
pub fn backward_of_heads<T: Real>(
    dp: &[T],
    p: &[T],
    seen: &HeadRows<'_>,
    scale: f64,
    dx: &mut [T],
) {
    let keys = seen.keys;
    let rows = |first: usize, dx: &mut [T]| {
        let range = first * keys..first * keys + dx.len();
        let rows = dp[range.clone()]
            .chunks_exact(keys)
            .zip(p[range].chunks_exact(keys));
        for (row, (dx, (dp, p))) in dx.chunks_exact_mut(keys).zip(rows).enumerate() {
            let (range, is_hidden) = seen.of_row(first + row);
            for (key, (dx, dp)) in dx.iter_mut().zip(dp).enumerate() {
                let hidden = !range.contains(&key) || is_hidden(key);
                *dx = if hidden { T::ZERO } else { *dp };
            }
            backward_rows_from(dx, p, keys, scale, |_| 0..keys);
        }
    };
    timed(Part::Softmax, || parallel::for_rows(dx, keys, rows));
}

/// The keys that each row of heads (B, H, Tq, Tk) sees.
pub struct HeadRows<'a> {
    pub mask: Mask,
    pub heads: usize,
    pub queries: usize,
    pub keys: usize,
    /// (B, Tq), or empty.
    pub first_keys: &'a [u32],
    /// 0 for a hidden pair.
    pub visible: Option<PerScore<'a, u8>>,
}

impl HeadRows<'_> {
    /// Returns the range of keys of a row, and which of them are hidden.
    fn of_row(&self, row: usize) -> (Range<usize>, impl Fn(usize) -> bool) {
        let (matrix, query) = (row / self.queries, row % self.queries);
        let (batch, head) = (matrix / self.heads, matrix % self.heads);
        let seen = KeyRanges::by_mask(self.mask, self.queries, self.keys);
        let first_keys = self.first_keys.chunks(self.queries).nth(batch);
        let range = seen
            .from_first_keys(first_keys.unwrap_or_default())
            .of_query(query);
        let visible = self.visible.map(|visible| visible.of(batch, head));
        (range, move |key| {
            visible.is_some_and(|visible| visible.at(query, key) == 0)
        })
    }
}

/// Computes softmax in place: `p` holds scores in rows of `width`, of which row i sees those at `visible(i)`. Unless
/// `lse` is empty, it receives `log(sum(exp(scale * x)))` of every row, -inf for rows without a visible key.
pub fn forward_rows_to<T: Real>(
    p: &mut [T],
    width: usize,
    scale: f64,
    visible: impl Fn(usize) -> Range<usize>,
    lse: &mut [T],
) {
    let rows = || {
        forward_visible(
            p,
            width,
            scale,
            visible,
            #[inline(always)]
            |row, top, sum| {
                if let Some(lse) = lse.get_mut(row) {
                    *lse = top + sum.logarithm();
                }
            },
        );
    };
    timed(Part::Softmax, rows);
}

/// Computes `dx = scale * p (dp - sum(dp p))` over the visible keys, 0 elsewhere.
pub fn backward<T: Real>(dp: &[T], p: &[T], seen: KeyRanges<'_>, scale: f64, dx: &mut [T]) {
    let rows = |first: usize, dx: &mut [T]| {
        let range = first * seen.keys..first * seen.keys + dx.len();
        dx.copy_from_slice(&dp[range.clone()]);
        backward_rows(dx, &p[range], first, seen, scale);
    };
    timed(Part::Softmax, || parallel::for_rows(dx, seen.keys, rows));
}

/// Computes softmax of whole rows in place; the first is row `first` of the batch.
pub(in crate::kernels::cpu) fn forward_rows<T: Real>(
    p: &mut [T],
    first: usize,
    seen: KeyRanges<'_>,
    scale: f64,
) {
    let visible = |row: usize| seen.of_row(first + row);
    forward_rows_to(p, seen.keys, scale, visible, &mut []);
}

/// Computes softmax of rows of `width` elements in place. Elements at `visible(i)` are scores of row i; the others
/// become 0. Calls `done(i, top, sum)` with the largest scaled score of row i and the sum of exponentials relative to
/// it.
#[inline(always)]
fn forward_visible<T: Real>(
    p: &mut [T],
    width: usize,
    scale: f64,
    visible: impl Fn(usize) -> Range<usize>,
    mut done: impl FnMut(usize, T, T),
) {
    let scale = T::real(scale);
    simd::vectorized(
        #[inline(always)]
        || {
            for (row, p) in p.chunks_exact_mut(width).enumerate() {
                let p = visible_part(p, visible(row), T::ZERO);
                for p in p.iter_mut() {
                    *p *= scale; // before the maximum, so that negative scales work
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

/// Returns the elements `visible` of a row, after filling the others with `zero`.
#[inline(always)]
pub(super) fn visible_part<T: Copy>(row: &mut [T], visible: Range<usize>, zero: T) -> &mut [T] {
    let (row, after) = row.split_at_mut(visible.end);
    after.fill(zero);
    let (before, row) = row.split_at_mut(visible.start);
    before.fill(zero);
    row
}

/// Computes dx of whole rows in place; the first is row `first` of the batch, and `dx` holds dp.
pub(in crate::kernels::cpu) fn backward_rows<T: Real>(
    dx: &mut [T],
    p: &[T],
    first: usize,
    seen: KeyRanges<'_>,
    scale: f64,
) {
    let visible = |row: usize| seen.of_row(first + row);
    backward_rows_from(dx, p, seen.keys, scale, visible);
}

/// Computes [`backward`] in place: `dx` holds dp in rows of `width`, of which row i sees those at `visible(i)`.
pub fn backward_rows_from<T: Real>(
    dx: &mut [T],
    p: &[T],
    width: usize,
    scale: f64,
    visible: impl Fn(usize) -> Range<usize>,
) {
    let scale = T::real(scale);
    let rows = || {
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = dx.chunks_exact_mut(width).zip(p.chunks_exact(width));
                for (row, (dx, p)) in rows.enumerate() {
                    let visible = visible(row);
                    let p = &p[visible.clone()];
                    let dx = visible_part(dx, visible, T::ZERO);
                    let inner = simd::dot(p, dx);
                    for (dx, p) in dx.iter_mut().zip(p) {
                        *dx = *p * (*dx - inner) * scale;
                    }
                }
            },
        );
    };
    timed(Part::Softmax, rows);
}
