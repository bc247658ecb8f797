//! AdamW's update, in place: one pass over parameter, gradient and state.
//!
//! With decay `1 - lr * weight_decay` and bias corrections `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t`:
//!
//! ```text
//! p *= decay
//! m += (1 - beta1) (g - m)
//! v  = beta2 v + (1 - beta2) g^2
//! p -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)
//! ```
//!
//! Elementwise, so that neither vector width nor threads change a bit. Memory bounds it: in `f32` it reads 16 bytes an
//! element and writes 12.

use super::{Real, Stored, parallel::TASK_ELEMENTS, simd, simd::BLOCK};
use crate::kernels::Update;
use rayon::prelude::*;

/// Updates `parameter`, `exp_avg` and `exp_avg_sq` from `gradient`; slices of one length.
pub fn step<T: Real>(
    parameter: &mut [T],
    gradient: &[T],
    exp_avg: &mut [T],
    exp_avg_sq: &mut [T],
    update: &Update,
) {
    let n = parameter.len();
    assert_eq!((gradient.len(), exp_avg.len(), exp_avg_sq.len()), (n, n, n));
    parameter
        .par_chunks_mut(TASK_ELEMENTS)
        .zip(gradient.par_chunks(TASK_ELEMENTS))
        .zip(exp_avg.par_chunks_mut(TASK_ELEMENTS))
        .zip(exp_avg_sq.par_chunks_mut(TASK_ELEMENTS))
        .for_each(|(((p, g), m), v)| {
            simd::vectorized(
                #[inline(always)]
                || range(p, g, m, v, update),
            )
        });
}

/// As [`step`] with `gradient * factor`, rounded as a pass of its own would: the gradient is read once, and not
/// written.
pub fn step_scaled<T: Real>(
    parameter: &mut [T],
    gradient: &[T],
    factor: f64,
    exp_avg: &mut [T],
    exp_avg_sq: &mut [T],
    update: &Update,
) {
    let n = parameter.len();
    assert_eq!((gradient.len(), exp_avg.len(), exp_avg_sq.len()), (n, n, n));
    let factor = T::real(factor);
    parameter
        .par_chunks_mut(TASK_ELEMENTS)
        .zip(gradient.par_chunks(TASK_ELEMENTS))
        .zip(exp_avg.par_chunks_mut(TASK_ELEMENTS))
        .zip(exp_avg_sq.par_chunks_mut(TASK_ELEMENTS))
        .for_each(|(((p, g), m), v)| {
            simd::vectorized(
                #[inline(always)]
                || {
                    let mut scaled = [T::ZERO; BLOCK];
                    let blocks = p.chunks_mut(BLOCK).zip(g.chunks(BLOCK));
                    let blocks = blocks.zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
                    for (((p, g), m), v) in blocks {
                        let scaled = &mut scaled[..g.len()];
                        for (scaled, g) in scaled.iter_mut().zip(g) {
                            *scaled = *g * factor;
                        }
                        range(p, scaled, m, v, update);
                    }
                },
            )
        });
}

/// As [`step`], for a parameter stored in half precision.
///
/// A step is often smaller than half the distance between two `bf16` numbers, and would be rounded away every time.
/// So the parameter's exact value is state too: `master` is updated in `f32`, and `parameter` becomes its rounding.
/// Where `parameter` is not `master`'s rounding, it was set since: `master` restarts from it.
pub fn step_half<P: Stored<Wide = f32>, G: Stored<Wide = f32>>(
    parameter: &mut [P],
    gradient: &[G],
    master: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    update: &Update,
) {
    let n = parameter.len();
    assert_eq!((gradient.len(), master.len()), (n, n));
    assert_eq!((exp_avg.len(), exp_avg_sq.len()), (n, n));
    parameter
        .par_chunks_mut(TASK_ELEMENTS)
        .zip(gradient.par_chunks(TASK_ELEMENTS))
        .zip(master.par_chunks_mut(TASK_ELEMENTS))
        .zip(exp_avg.par_chunks_mut(TASK_ELEMENTS))
        .zip(exp_avg_sq.par_chunks_mut(TASK_ELEMENTS))
        .for_each(|((((p, g), master), m), v)| {
            simd::vectorized(
                #[inline(always)]
                || {
                    let mut current = [0f32; BLOCK];
                    let mut buffer = [0f32; BLOCK];
                    let blocks = p
                        .chunks_mut(BLOCK)
                        .zip(g.chunks(BLOCK))
                        .zip(master.chunks_mut(BLOCK))
                        .zip(m.chunks_mut(BLOCK))
                        .zip(v.chunks_mut(BLOCK));
                    for ((((p, g), master), m), v) in blocks {
                        let current = &mut current[..p.len()];
                        let buffer = &mut buffer[..p.len()];
                        P::load(p, current);
                        P::store(master, p);
                        P::load(p, buffer);
                        for ((exact, rounded), current) in
                            master.iter_mut().zip(buffer.iter()).zip(current.iter())
                        {
                            *exact = if *rounded == *current {
                                *exact
                            } else {
                                *current
                            };
                        }
                        G::load(g, buffer);
                        range(master, buffer, m, v, update);
                        P::store(master, p);
                    }
                },
            );
        });
}

/// The update of one range, in PyTorch's order of operations.
#[inline(always)]
fn range<T: Real>(
    parameter: &mut [T],
    gradient: &[T],
    exp_avg: &mut [T],
    exp_avg_sq: &mut [T],
    update: &Update,
) {
    let decay = T::real(update.decay);
    let first_share = T::real(update.first_share);
    let beta2 = T::real(update.beta2);
    let second_share = T::real(update.second_share);
    let step_size = T::real(update.step_size);
    let second_correction = T::real(update.second_correction);
    let eps = T::real(update.eps);
    let elements = parameter
        .iter_mut()
        .zip(gradient)
        .zip(exp_avg)
        .zip(exp_avg_sq);
    for (((p, g), m), v) in elements {
        let first = *m + first_share * (*g - *m);
        let second = *v * beta2 + second_share * *g * *g;
        let denominator = second.square_root() / second_correction + eps;
        *p = *p * decay - step_size * first / denominator;
        *m = first;
        *v = second;
    }
}
