//! Cross-entropy of logits: the mean over the targets that count of `ln(sum(exp(row))) - row[target]`.
//!
//! With top the largest logit of a row and total the sum of `exp(x - top)` over it, the loss of a row is
//! `(top - row[target]) + ln(total)` and its softmax is `exp(x - top) / total`. The sum `top + ln(total)` is never
//! formed: for large logits, rounding it to one number would lose the digits of ln(total).

use crate::kernels::cpu::{Blocks, Real, Stored, parallel, simd, simd::BLOCK};
use rayon::prelude::*;

/// Computes each row's loss and the pairs (top, total) in `statistics` (rows, 2), from `logits` (rows, classes). A
/// target of `None` gives a loss of 0.
pub fn forward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    loss: &mut [T::Wide],
    statistics: &mut [T::Wide],
) {
    // A row has thousands of elements: divide by rows of logits, not by the few outputs.
    let per_task = (parallel::TASK_ELEMENTS / classes.max(1)).max(1);
    let outputs = loss
        .par_chunks_mut(per_task)
        .zip(statistics.par_chunks_mut(2 * per_task));
    outputs.enumerate().for_each(|(task, (loss, statistics))| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                let rows = loss.iter_mut().zip(statistics.chunks_exact_mut(2));
                for (i, (loss, statistics)) in rows.enumerate() {
                    let row = task * per_task + i;
                    let x = &logits[row * classes..(row + 1) * classes];
                    let (top, total) = top_and_total(&mut reading, x);
                    statistics[0] = top;
                    statistics[1] = total;
                    *loss = match target(row) {
                        Some(class) => (top - T::Wide::real(x[class].to_f64())) + total.logarithm(),
                        None => T::Wide::ZERO,
                    };
                }
            },
        );
    });
}

/// Returns a row's largest element, and the sum of `exp(x - top)` over it.
#[inline(always)]
pub(super) fn top_and_total<T: Stored>(
    reading: &mut Blocks<T, 1, 0>,
    x: &[T],
) -> (T::Wide, T::Wide) {
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
    (top, total)
}

/// Computes `dlogits[row] = (softmax(row) - onehot(target)) * weight`, or 0 for rows whose target does not count.
/// `statistics` are those of [`forward`].
pub fn backward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    statistics: &[T::Wide],
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
                    let (top, total) = (statistics[2 * row], statistics[2 * row + 1]);
                    let share = weight / total;
                    writing.each(
                        [x],
                        [dx],
                        #[inline(always)]
                        |start, [x], [dx]| {
                            for (dx, x) in dx.iter_mut().zip(x) {
                                *dx = (*x - top).exponential() * share;
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

/// Runs [`forward`] and [`backward`] in one pass, for logits that are not read afterwards: `logits` becomes
/// `(softmax(row) - onehot(target)) * weight`, and `loss` the losses of the rows. A row has `classes` logits, and rows
/// are `row_stride` elements apart.
///
/// It computes one exponential per element, where the two passes compute two. In half precision it computes two as
/// well, because an exponential cannot be stored in place.
pub fn forward_backward_in_place<T: Stored>(
    logits: &mut [T],
    [classes, row_stride]: [usize; 2],
    target: impl Fn(usize) -> Option<usize> + Sync,
    weight: T::Wide,
    loss: &mut [T::Wide],
) {
    parallel::for_rows2(logits, row_stride, loss, 1, |first, logits, loss| {
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact_mut(row_stride).zip(loss);
                for (i, (row, loss)) in rows.enumerate() {
                    let x = &mut row[..classes];
                    let Some(class) = target(first + i) else {
                        x.fill(T::zero());
                        *loss = T::Wide::ZERO;
                        continue;
                    };
                    *loss = match T::as_wide_mut(x) {
                        Some(x) => wide_row_in_place(x, class, weight),
                        None => narrow_row_in_place(x, class, weight),
                    };
                }
            },
        );
    });
}

/// Processes a row that is stored in the compute type; returns its loss.
#[inline(always)]
fn wide_row_in_place<T: Real>(x: &mut [T], class: usize, weight: T) -> T {
    let top = simd::max(x);
    let above = top - x[class];
    for x in x.iter_mut() {
        *x = (*x - top).exponential();
    }
    let total = simd::sum(x);
    let share = weight / total;
    for x in x.iter_mut() {
        *x *= share;
    }
    x[class] -= weight;
    above + total.logarithm()
}

/// Processes a row in half precision, widened block by block, as [`forward`] and [`backward`] do; returns its loss.
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
    let loss = (top - T::Wide::real(x[class].to_f64())) + total.logarithm();
    let share = weight / total;
    for (i, block) in x.chunks_mut(BLOCK).enumerate() {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        for x in wide.iter_mut() {
            *x = (*x - top).exponential() * share;
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
    use candle_core::WithDType;
    use half::{bf16, f16};

    /// Checks that the in-place version has the same bits as [`forward`] and [`backward`].
    fn in_place_is_both<T: Stored>(rows: usize, classes: usize) {
        let value = |i: usize| T::from_f64((i as f64 * 0.37).sin() * 6.0);
        let logits: Vec<T> = (0..rows * classes).map(value).collect();
        let class = |row: usize| (row * row + 511) % classes;
        let zeros = |len| vec![T::Wide::ZERO; len];
        let (mut loss, mut statistics) = (zeros(rows), zeros(2 * rows));
        let weight = T::Wide::real(1024.0 / rows as f64);
        let target = |row| Some(class(row));
        forward(&logits, classes, target, &mut loss, &mut statistics);
        let mut gradient = vec![T::zero(); logits.len()];
        backward(&logits, classes, target, &statistics, weight, &mut gradient);
        for row_stride in [classes, classes + 3] {
            let apart = |rows: &[T], between: T| -> Vec<T> {
                let rows = rows.chunks(classes);
                rows.flat_map(|row| [row, &vec![between; row_stride - classes]].concat())
                    .collect()
            };
            let between = T::from_f64(99.0); // must be neither read nor written
            let (mut got, mut got_loss) = (apart(&logits, between), zeros(rows));
            let dims = [classes, row_stride];
            forward_backward_in_place(&mut got, dims, target, weight, &mut got_loss);
            let is_both = got == apart(&gradient, between) && got_loss == loss;
            assert!(is_both, "{rows} x {classes} by {row_stride}");
        }
    }

    /// Seven logits of 2^15 in each row, and the others far below: the loss is ln 7. f32 would round 2^15 + ln 7 with
    /// an error of 6e-4 relative to the loss.
    fn large_logits<T: Stored>(unit: f64) {
        let (rows, classes) = (3, 600);
        let top = |place: usize| place.is_multiple_of(97);
        let value = |i: usize| if top(i % classes) { 32768.0 } else { 31744.0 };
        let logits: Vec<T> = (0..rows * classes).map(|i| T::from_f64(value(i))).collect();
        let class = |row: usize| 97 * row;
        let zeros = |len| vec![T::Wide::ZERO; len];
        let (mut loss, mut statistics) = (zeros(rows), zeros(2 * rows));
        let mut gradient = vec![T::zero(); logits.len()];
        let target = |row| Some(class(row));
        let weight = T::Wide::ONE;
        forward(&logits, classes, target, &mut loss, &mut statistics);
        backward(&logits, classes, target, &statistics, weight, &mut gradient);
        let (mut in_place, mut in_place_loss) = (logits, zeros(rows));
        forward_backward_in_place(
            &mut in_place,
            [classes; 2],
            target,
            weight,
            &mut in_place_loss,
        );
        for loss in loss.iter().chain(&in_place_loss) {
            let (loss, exact) = (WithDType::to_f64(*loss), 7f64.ln());
            assert!((loss - exact).abs() <= 2e-7 * exact, "{loss}");
        }
        for (i, found) in gradient.iter().chain(&in_place).enumerate() {
            let (row, place) = (i / classes % rows, i % classes);
            let p = if top(place) { 1.0 / 7.0 } else { 0.0 };
            let exact = p - f64::from(u8::from(place == class(row)));
            let found = found.to_f64();
            assert!(
                (found - exact).abs() <= unit * exact.abs(),
                "{found}, not {exact}"
            );
        }
    }

    #[test]
    fn large_logits_keep_the_digits_of_small_losses() {
        large_logits::<f64>(1e-14);
        large_logits::<f32>(2f64.powi(-22));
        large_logits::<f16>(2f64.powi(-11));
        large_logits::<bf16>(2f64.powi(-8));
    }

    #[test]
    fn half_precision_in_place() {
        for (rows, classes) in [(1, 1), (3, 97), (5, 512), (40, 1300)] {
            in_place_is_both::<bf16>(rows, classes);
            in_place_is_both::<f16>(rows, classes);
        }
    }
}
