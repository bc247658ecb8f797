//! Softmax and its gradient over the rows of a block, a strip of keys at a time.

use crate::kernels::cpu::{Lanes, simd};

/// The visible part of a strip from key `first` on, of a row that sees `visible` keys.
#[inline(always)]
fn seen(visible: usize, first: usize, columns: usize) -> usize {
    visible.saturating_sub(first).min(columns)
}

/// The maxima of `scale * scores` over each row's visible keys: scores (rows, row).
pub(super) fn tops<T: Lanes>(
    scores: &[T],
    row: usize,
    scale: T,
    visible: impl Fn(usize) -> usize,
    tops: &mut [T],
) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (i, (scores, top)) in scores.chunks_exact(row).zip(tops).enumerate() {
                let scores = &scores[..visible(i)];
                // Of the scores or of their negatives: rounding keeps the order.
                *top = match scale < T::ZERO {
                    false => scale * simd::max(scores),
                    true => scale * -max_of_negatives(scores),
                };
            }
        },
    );
}

/// The maximum of -x.
#[inline(always)]
fn max_of_negatives<T: Lanes>(x: &[T]) -> T {
    let mut most = -x[0];
    for x in x {
        let negative = -*x;
        if negative > most {
            most = negative;
        }
    }
    most
}

/// A strip of scores or of exponentials among those of a block.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// Its first key.
    pub first: usize,
    /// Keys.
    pub columns: usize,
    /// From one row of the block to the next.
    pub row: usize,
}

/// `e = exp(scale scores - top)` of a strip, 0 where a row does not see the key; adds each row's sum to `sums`.
pub(super) fn exponentials<T: Lanes>(
    strip: Strip,
    scores: &[T],
    scale: T,
    tops: &[T],
    visible: impl Fn(usize) -> usize,
    e: &mut [T],
    sums: &mut [T],
) {
    let Strip {
        first,
        columns,
        row,
    } = strip;
    simd::vectorized(
        #[inline(always)]
        || {
            for (i, (top, sum)) in tops.iter().zip(sums).enumerate() {
                let at = i * row + first..i * row + first + columns;
                let (scores, e) = (&scores[at.clone()], &mut e[at]);
                let (e, hidden) = e.split_at_mut(seen(visible(i), first, columns));
                for (e, score) in e.iter_mut().zip(scores) {
                    *e = (*score * scale - *top).exponential();
                }
                *sum += simd::sum(e);
                hidden.fill(T::ZERO);
            }
        },
    );
}

/// `ds = scale e (dp - delta)` of a strip, from dp in `ds` (rows, ds_row); 0 where a row does not see the key.
pub(super) fn gradients<T: Lanes>(
    strip: Strip,
    e: &[T],
    deltas: &[T],
    scale: T,
    visible: impl Fn(usize) -> usize,
    ds: &mut [T],
    ds_row: usize,
) {
    let Strip {
        first,
        columns,
        row,
    } = strip;
    simd::vectorized(
        #[inline(always)]
        || {
            for (i, (delta, ds)) in deltas.iter().zip(ds.chunks_exact_mut(ds_row)).enumerate() {
                let e = &e[i * row + first..][..columns];
                let ds = &mut ds[..columns];
                let (ds, hidden) = ds.split_at_mut(seen(visible(i), first, columns));
                for (ds, e) in ds.iter_mut().zip(e) {
                    *ds = *e * (*ds - *delta) * scale;
                }
                hidden.fill(T::ZERO);
            }
        },
    );
}
