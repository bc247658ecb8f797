//! Cross-entropy of logits: the mean over the targets that count of `ln(sum(exp(row))) - row[target]`.
//!
//! With top the largest logit of a row and total the sum of `exp(x - top)` over it, the loss of a row is
//! `(top - row[target]) + ln(total)` and its softmax is `exp(x - top) / total`. The sum `top + ln(total)` is never
//! formed: for large logits, rounding it to one number would lose the digits of ln(total).

//! Label smoothing replaces `row[target]` by a mean of it and of all elements, and a z-loss adds the square of the
//! row's log-sum-exp ([`Terms`]).

use crate::kernels::cpu::{Blocks, Real, Stored, parallel, simd, simd::BLOCK};
use rayon::prelude::*;

/// The terms of a row's loss: `(1 - smoothing) nll + smoothing mean(nll of all classes) + z_loss lse^2`.
#[derive(Clone, Copy)]
pub struct Terms<R> {
    /// The share of the target that is spread over all classes; 0 for none.
    pub smoothing: R,
    /// The coefficient of the squared log-sum-exp; 0 for none.
    pub z_loss: R,
}

impl<R: Real> Terms<R> {
    /// Returns the loss of a row, from `top - row[target]` and, for smoothing, the mean of `top - row`.
    #[inline(always)]
    fn loss(self, [top, total]: [R; 2], above: R, mean_above: impl FnOnce() -> R) -> R {
        let log_total = total.logarithm();
        let mut loss = above + log_total;
        if self.smoothing > R::ZERO {
            let smooth = mean_above() + log_total;
            loss = (R::ONE - self.smoothing) * loss + self.smoothing * smooth;
        }
        if self.z_loss > R::ZERO {
            let lse = top + log_total;
            loss += self.z_loss * lse * lse;
        }
        loss
    }

    /// Returns the parts of a row's gradient, which is `factor softmax(row) - spread - share onehot(target)`.
    #[inline(always)]
    fn slopes(self, weight: R, [top, total]: [R; 2], classes: usize) -> [R; 3] {
        let factor = match self.z_loss > R::ZERO {
            true => {
                let lse = top + total.logarithm();
                weight * (R::ONE + (self.z_loss + self.z_loss) * lse)
            }
            false => weight,
        };
        let spread = weight * self.smoothing / R::real(classes as f64);
        [factor, spread, weight * (R::ONE - self.smoothing)]
    }
}

/// Computes each row's loss and the pairs (top, total) in `statistics` (rows, 2), from `logits` (rows, classes). A
/// target of `None` gives a loss of 0.
pub fn forward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    terms: Terms<T::Wide>,
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
                        Some(class) => {
                            let above = top - T::Wide::real(x[class].to_f64());
                            terms.loss([top, total], above, || mean_above(&mut reading, x, top))
                        }
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

/// Returns the mean of `top - x` over a row.
#[inline(always)]
fn mean_above<T: Stored>(reading: &mut Blocks<T, 1, 0>, x: &[T], top: T::Wide) -> T::Wide {
    let mut sum = T::Wide::ZERO;
    reading.each(
        [x],
        [],
        #[inline(always)]
        |_, [x], []| sum += simd::sum_over([x], |[x]| top - x),
    );
    sum / T::Wide::real(x.len() as f64)
}

/// Computes `dlogits[row] = (softmax(row) - onehot(target)) * weight(row)` and the gradients of other terms, or 0 for
/// rows whose target does not count. `statistics` are those of [`forward`].
pub fn backward<T: Stored>(
    logits: &[T],
    classes: usize,
    target: impl Fn(usize) -> Option<usize> + Sync,
    terms: Terms<T::Wide>,
    statistics: &[T::Wide],
    weight: impl Fn(usize) -> T::Wide + Sync,
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
                    let [factor, spread, share] = terms.slopes(weight(row), [top, total], classes);
                    let factor = factor / total;
                    writing.each(
                        [x],
                        [dx],
                        #[inline(always)]
                        |start, [x], [dx]| {
                            for (dx, x) in dx.iter_mut().zip(x) {
                                *dx = (*x - top).exponential() * factor - spread;
                            }
                            if (start..start + dx.len()).contains(&class) {
                                dx[class - start] -= share;
                            }
                        },
                    );
                }
            },
        );
    });
}

/// Runs [`forward`] and [`backward`] in one pass, for logits that are not read afterwards: `logits` becomes
/// `(softmax(row) - onehot(target)) * weight` with the gradients of other terms, and `loss` the losses of the rows. A
/// row has `classes` logits, and rows are `row_stride` elements apart.
///
/// It computes one exponential per element, where the two passes compute two. In half precision it computes two as
/// well, because an exponential cannot be stored in place.
pub fn forward_backward_in_place<T: Stored>(
    logits: &mut [T],
    [classes, row_stride]: [usize; 2],
    target: impl Fn(usize) -> Option<usize> + Sync,
    terms: Terms<T::Wide>,
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
                        Some(x) => wide_row_in_place(x, class, terms, weight),
                        None => narrow_row_in_place(x, class, terms, weight),
                    };
                }
            },
        );
    });
}

/// Processes a row that is stored in the compute type; returns its loss.
#[inline(always)]
fn wide_row_in_place<T: Real>(x: &mut [T], class: usize, terms: Terms<T>, weight: T) -> T {
    let top = simd::max(x);
    let above = top - x[class];
    let classes = T::real(x.len() as f64);
    let mean_above = match terms.smoothing > T::ZERO {
        true => simd::sum_over([&*x], |[x]| top - x) / classes,
        false => T::ZERO,
    };
    for x in x.iter_mut() {
        *x = (*x - top).exponential();
    }
    let total = simd::sum(x);
    let [factor, spread, share] = terms.slopes(weight, [top, total], x.len());
    let factor = factor / total;
    for x in x.iter_mut() {
        *x = *x * factor - spread;
    }
    x[class] -= share;
    terms.loss([top, total], above, || mean_above)
}

/// Processes a row in half precision, widened block by block, as [`forward`] and [`backward`] do; returns its loss.
#[inline(always)]
fn narrow_row_in_place<T: Stored>(
    x: &mut [T],
    class: usize,
    terms: Terms<T::Wide>,
    weight: T::Wide,
) -> T::Wide {
    let mut buffer = [T::Wide::ZERO; BLOCK];
    let mut top = T::Wide::NEG_INFINITY;
    for block in x.chunks(BLOCK) {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        top = top.larger(simd::max(wide));
    }
    let (mut total, mut sum_above) = (T::Wide::ZERO, T::Wide::ZERO);
    for block in x.chunks(BLOCK) {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        total += simd::sum_over([&*wide], |[x]| (x - top).exponential());
        if terms.smoothing > T::Wide::ZERO {
            sum_above += simd::sum_over([&*wide], |[x]| top - x);
        }
    }
    let above = top - T::Wide::real(x[class].to_f64());
    let classes = T::Wide::real(x.len() as f64);
    let loss = terms.loss([top, total], above, || sum_above / classes);
    let [factor, spread, share] = terms.slopes(weight, [top, total], x.len());
    let factor = factor / total;
    for (i, block) in x.chunks_mut(BLOCK).enumerate() {
        let wide = &mut buffer[..block.len()];
        T::load(block, wide);
        for x in wide.iter_mut() {
            *x = (*x - top).exponential() * factor - spread;
        }
        if i == class / BLOCK {
            wide[class % BLOCK] -= share;
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
    fn in_place_is_both<T: Stored>(rows: usize, classes: usize, [smoothing, z_loss]: [f64; 2]) {
        let terms = Terms {
            smoothing: Real::real(smoothing),
            z_loss: Real::real(z_loss),
        };
        let value = |i: usize| T::from_f64((i as f64 * 0.37).sin() * 6.0);
        let logits: Vec<T> = (0..rows * classes).map(value).collect();
        let class = |row: usize| (row * row + 511) % classes;
        let zeros = |len| vec![T::Wide::ZERO; len];
        let (mut loss, mut statistics) = (zeros(rows), zeros(2 * rows));
        let weight = T::Wide::real(1024.0 / rows as f64);
        let target = |row| Some(class(row));
        forward(&logits, classes, target, terms, &mut loss, &mut statistics);
        let mut gradient = vec![T::zero(); logits.len()];
        let of_row = |_| weight;
        backward(
            &logits,
            classes,
            target,
            terms,
            &statistics,
            of_row,
            &mut gradient,
        );
        for row_stride in [classes, classes + 3] {
            let apart = |rows: &[T], between: T| -> Vec<T> {
                let rows = rows.chunks(classes);
                rows.flat_map(|row| [row, &vec![between; row_stride - classes]].concat())
                    .collect()
            };
            let between = T::from_f64(99.0); // must be neither read nor written
            let (mut got, mut got_loss) = (apart(&logits, between), zeros(rows));
            let dims = [classes, row_stride];
            forward_backward_in_place(&mut got, dims, target, terms, weight, &mut got_loss);
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
        let terms = Terms {
            smoothing: T::Wide::ZERO,
            z_loss: T::Wide::ZERO,
        };
        forward(&logits, classes, target, terms, &mut loss, &mut statistics);
        backward(
            &logits,
            classes,
            target,
            terms,
            &statistics,
            |_| weight,
            &mut gradient,
        );
        let (mut in_place, mut in_place_loss) = (logits, zeros(rows));
        forward_backward_in_place(
            &mut in_place,
            [classes; 2],
            target,
            terms,
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
            for terms in [[0.0, 0.0], [0.1, 0.0], [0.2, 1e-2]] {
                in_place_is_both::<bf16>(rows, classes, terms);
                in_place_is_both::<f16>(rows, classes, terms);
            }
        }
    }
}
