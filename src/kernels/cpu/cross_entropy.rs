//! Cross-entropy of logits: loss = mean over the targets that count of `lse(row) - row[target]`.

use super::{Blocks, Real, Stored, parallel, simd, stored::BLOCK};
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
/// One exponential an element, where the two passes take two; in half precision, which has no room for exponentials, two.
pub fn forward_backward_in_place<T: Stored>(
    logits: &mut [T],
    classes: usize,
    target: impl Fn(usize) -> usize + Sync,
    weight: T::Wide,
    loss: &mut [T::Wide],
) {
    parallel::for_rows2(logits, classes, loss, 1, |first, logits, loss| {
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact_mut(classes).zip(loss);
                for (i, (x, loss)) in rows.enumerate() {
                    let class = target(first + i);
                    *loss = match T::as_wide_mut(x) {
                        Some(x) => wide_row_in_place(x, class, weight),
                        None => narrow_row_in_place(x, class, weight),
                    };
                }
            },
        );
    });
}

/// One row of a type that is computed in: returns its loss.
#[inline(always)]
fn wide_row_in_place<T: Real>(x: &mut [T], class: usize, weight: T) -> T {
    let top = simd::max(x);
    let wanted = x[class] - top;
    for x in x.iter_mut() {
        *x = (*x - top).exponential();
    }
    let total = simd::sum(x);
    let share = weight / total;
    for x in x.iter_mut() {
        *x *= share;
    }
    x[class] -= weight;
    total.logarithm() - wanted
}

/// One row of a type that is widened block by block, as [`forward`] and [`backward`] compute it: returns its loss.
#[inline(always)]
fn narrow_row_in_place<T: Stored>(x: &mut [T], class: usize, weight: T::Wide) -> T::Wide {
    let mut buffer = [T::Wide::ZERO; BLOCK];
    let mut top = T::Wide::NEG_INFINITY;
    for block in x.chunks(BLOCK) {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        top = top.larger(simd::max(wide));
    }
    let mut total = T::Wide::ZERO;
    for block in x.chunks(BLOCK) {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        total += simd::sum_over([wide], |[x]| (x - top).exponential());
    }
    let lse = top + total.logarithm();
    let loss = lse - T::Wide::real(x[class].to_f64());
    for (i, block) in x.chunks_mut(BLOCK).enumerate() {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        for x in wide.iter_mut() {
            *x = (*x - lse).exponential() * weight;
        }
        if i == class / BLOCK {
            wide[class % BLOCK] -= weight;
        }
        T::store(wide, block);
    }
    loss
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// In place is [`forward`] and [`backward`], to the bit.
    fn in_place_is_both<T: Stored>(rows: usize, classes: usize) {
        let value = |i: usize| T::from_f64((i as f64 * 0.37).sin() * 6.0);
        let logits: Vec<T> = (0..rows * classes).map(value).collect();
        let class = |row: usize| (row * row + 511) % classes;
        let (mut loss, mut lse) = (vec![T::Wide::ZERO; rows], vec![T::Wide::ZERO; rows]);
        let weight = T::Wide::real(1024.0 / rows as f64);
        let target = |row| Some(class(row));
        forward(&logits, classes, target, &mut loss, &mut lse);
        let mut gradient = vec![T::zero(); logits.len()];
        backward(&logits, classes, target, &lse, weight, &mut gradient);
        let (mut got, mut got_loss) = (logits, vec![T::Wide::ZERO; rows]);
        forward_backward_in_place(&mut got, classes, class, weight, &mut got_loss);
        assert!(got == gradient && got_loss == loss, "{rows} x {classes}");
    }

    #[test]
    fn half_precision_in_place() {
        for (rows, classes) in [(1, 1), (3, 97), (5, 512), (40, 1300)] {
            in_place_is_both::<bf16>(rows, classes);
            in_place_is_both::<f16>(rows, classes);
        }
    }
}
