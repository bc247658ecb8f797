//! Cross-entropy of logits: loss = mean over the targets that count of `lse(row) - row[target]`.

use super::{Blocks, Real, Stored, parallel, simd};
use rayon::prelude::*;

/// Each row's loss and log-sum-exp, from `logits` (rows, classes); a target of `None` gives a loss of 0.
pub fn forward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    loss: &mut [T::Wide],
    lse: &mut [T::Wide],
) {
    // A row is thousands of elements: cut by rows of logits, not by the few outputs.
    let per_task = (parallel::TASK_ELEMENTS / classes.max(1)).max(1);
    let outputs = loss
        .par_chunks_mut(per_task)
        .zip(lse.par_chunks_mut(per_task));
    outputs.enumerate().for_each(|(task, (loss, lse))| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                for (i, (loss, lse)) in loss.iter_mut().zip(lse).enumerate() {
                    let row = task * per_task + i;
                    let x = &logits[row * classes..(row + 1) * classes];
                    let mut top = T::Wide::NEG_INFINITY;
                    reading.each(
                        [x],
                        [],
                        #[inline(always)]
                        |_, [x], []| top = top.larger(simd::max(x)),
                    );
                    let mut total = T::Wide::ZERO;
                    reading.each(
                        [x],
                        [],
                        #[inline(always)]
                        |_, [x], []| total += simd::sum_over([x], |[x]| (x - top).exponential()),
                    );
                    *lse = top + total.logarithm();
                    *loss = match target(row) {
                        Some(class) => *lse - T::Wide::real(x[class].to_f64()),
                        None => T::Wide::ZERO,
                    };
                }
            },
        );
    });
}

/// `dlogits[row] = (softmax(row) - onehot(target)) * weight`, 0 for rows whose target does not count.
pub fn backward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    lse: &[T::Wide],
    weight: T::Wide,
    dlogits: &mut [T],
) {
    parallel::for_rows(dlogits, classes, |first, dlogits| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut writing = Blocks::<T, 1, 1>::new();
                for (i, dx) in dlogits.chunks_exact_mut(classes).enumerate() {
                    let row = first + i;
                    let Some(class) = target(row) else {
                        dx.fill(T::zero());
                        continue;
                    };
                    let x = &logits[row * classes..(row + 1) * classes];
                    let lse = lse[row];
                    writing.each(
                        [x],
                        [dx],
                        #[inline(always)]
                        |start, [x], [dx]| {
                            for (dx, x) in dx.iter_mut().zip(x) {
                                *dx = (*x - lse).exponential() * weight;
                            }
                            if (start..start + dx.len()).contains(&class) {
                                dx[class - start] -= weight;
                            }
                        },
                    );
                }
            },
        );
    });
}

/// [`forward`] and [`backward`] in one go, for logits that nobody reads afterwards: `logits` becomes
/// `(softmax(row) - onehot(target)) * weight`, `loss` the rows' losses.
///
/// One exponential an element, where the two passes take two.
pub fn forward_backward_in_place<T: Real>(
    logits: &mut [T],
    classes: usize,
    target: impl Fn(usize) -> usize + Sync,
    weight: T,
    loss: &mut [T],
) {
    parallel::for_rows2(logits, classes, loss, 1, |first, logits, loss| {
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact_mut(classes).zip(loss);
                for (i, (x, loss)) in rows.enumerate() {
                    let class = target(first + i);
                    let top = simd::max(x);
                    let wanted = x[class] - top;
                    for x in x.iter_mut() {
                        *x = (*x - top).exponential();
                    }
                    let total = simd::sum(x);
                    *loss = total.logarithm() - wanted;
                    let share = weight / total;
                    for x in x.iter_mut() {
                        *x *= share;
                    }
                    x[class] -= weight;
                }
            },
        );
    });
}
