//! AdamW's update, in place: one pass over parameter, gradient and state.
//!
//! With decay `1 - lr * weight_decay` and bias corrections `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t`:
//!
//! ```text
//! g  = min(max(g, -clip), clip)   (NaN stays)
//! p *= decay
//! m += (1 - beta1) (g - m)
//! v  = beta2 v + (1 - beta2) g^2
//! p -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)
//! ```
//!
//! The update is elementwise, so neither vector width nor thread count changes a bit. It is memory-bound: in `f32` it
//! reads 16 bytes per element and writes 12.

use super::{Real, Stored, parallel::TASK_ELEMENTS, simd, simd::BLOCK};
use crate::kernels::{Update, stochastic};
use half::bf16;
use rayon::prelude::*;

/// A type that moments are stored in.
pub trait Moment: Stored {
    /// Calls `step` with both moments widened to the compute type. The slices hold elements `first..` of a parameter,
    /// at most [`BLOCK`] of them.
    fn update(
        moments: [&mut [Self]; 2],
        update: &Update,
        first: usize,
        step: impl FnOnce(&mut [Self::Wide], &mut [Self::Wide]),
    );
}

macro_rules! stored_as_computed {
    ($($T:ty),+) => {$(
        impl Moment for $T {
            #[inline(always)]
            fn update(
                [m, v]: [&mut [Self]; 2],
                _: &Update,
                _: usize,
                step: impl FnOnce(&mut [Self], &mut [Self]),
            ) {
                step(m, v);
            }
        }
    )+};
}
stored_as_computed!(f32, f64);

/// Rounds stochastically: most steps change a moment by less than the spacing of bf16.
impl Moment for bf16 {
    #[inline(always)]
    fn update(
        [m, v]: [&mut [Self]; 2],
        update: &Update,
        first: usize,
        step: impl FnOnce(&mut [f32], &mut [f32]),
    ) {
        let mut buffers = [[0f32; BLOCK]; 2];
        let [wide_m, wide_v] = buffers.each_mut().map(|buffer| &mut buffer[..m.len()]);
        Self::load(m, wide_m);
        Self::load(v, wide_v);
        step(wide_m, wide_v);
        for (i, (m, v)) in wide_m.iter_mut().zip(wide_v.iter_mut()).enumerate() {
            let random = stochastic::bits(update.rounding, (first + i) as u32);
            *m = stochastic::round_to_bf16(*m, random & 0xffff);
            *v = stochastic::round_to_bf16(*v, random >> 16);
        }
        Self::store(wide_m, m);
        Self::store(wide_v, v);
    }
}

/// Updates `parameter`, `exp_avg` and `exp_avg_sq` from `gradient`; slices of one length.
pub fn step<T: Real, M: Moment<Wide = T>>(
    parameter: &mut [T],
    gradient: &[T],
    exp_avg: &mut [M],
    exp_avg_sq: &mut [M],
    update: &Update,
) {
    let each = |p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]| range(p, g, m, v, update);
    in_blocks(parameter, gradient, [exp_avg, exp_avg_sq], update, each);
}

/// Runs [`step`] with `gradient * factor`, rounded as a separate scaling pass would round it. The gradient is read once
/// and not written.
pub fn step_scaled<T: Real, M: Moment<Wide = T>>(
    parameter: &mut [T],
    gradient: &[T],
    factor: f64,
    exp_avg: &mut [M],
    exp_avg_sq: &mut [M],
    update: &Update,
) {
    let factor = T::real(factor);
    let each = |p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]| {
        let mut scaled = [T::ZERO; BLOCK];
        let scaled = &mut scaled[..g.len()];
        for (scaled, g) in scaled.iter_mut().zip(g) {
            *scaled = *g * factor;
        }
        range(p, scaled, m, v, update);
    };
    in_blocks(parameter, gradient, [exp_avg, exp_avg_sq], update, each);
}

/// Calls `each` with parameter, gradient and moments, block by block.
#[inline(always)]
fn in_blocks<T: Real, M: Moment<Wide = T>>(
    parameter: &mut [T],
    gradient: &[T],
    [exp_avg, exp_avg_sq]: [&mut [M]; 2],
    update: &Update,
    each: impl Fn(&mut [T], &[T], &mut [T], &mut [T]) + Sync,
) {
    let n = parameter.len();
    assert_eq!((gradient.len(), exp_avg.len(), exp_avg_sq.len()), (n, n, n));
    parameter
        .par_chunks_mut(TASK_ELEMENTS)
        .zip(gradient.par_chunks(TASK_ELEMENTS))
        .zip(exp_avg.par_chunks_mut(TASK_ELEMENTS))
        .zip(exp_avg_sq.par_chunks_mut(TASK_ELEMENTS))
        .enumerate()
        .for_each(|(task, (((p, g), m), v))| {
            simd::vectorized(
                #[inline(always)]
                || {
                    let blocks = p.chunks_mut(BLOCK).zip(g.chunks(BLOCK));
                    let blocks = blocks.zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
                    for (i, (((p, g), m), v)) in blocks.enumerate() {
                        let first = task * TASK_ELEMENTS + i * BLOCK;
                        M::update([m, v], update, first, |m, v| each(p, g, m, v));
                    }
                },
            )
        });
}

/// Runs [`step`] for a parameter stored in half precision.
///
/// A step is often smaller than half the spacing of `bf16` numbers and would be rounded away every time. So the state
/// has a master copy: `master` is updated in `f32`, and `parameter` is set to its rounding. If `parameter` is not the
/// rounding of `master`, it was changed since the last step: `master` then restarts from `parameter`.
pub fn step_half<P: Stored<Wide = f32>, G: Stored<Wide = f32>, M: Moment<Wide = f32>>(
    parameter: &mut [P],
    gradient: &[G],
    master: &mut [f32],
    exp_avg: &mut [M],
    exp_avg_sq: &mut [M],
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
        .enumerate()
        .for_each(|(task, ((((p, g), master), m), v))| {
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
                    for (i, ((((p, g), master), m), v)) in blocks.enumerate() {
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
                        let first = task * TASK_ELEMENTS + i * BLOCK;
                        M::update([m, v], update, first, |m, v| {
                            range(master, buffer, m, v, update);
                        });
                        P::store(master, p);
                    }
                },
            );
        });
}

/// Updates one range, in PyTorch's order of operations.
#[inline(always)]
fn range<T: Real>(
    parameter: &mut [T],
    gradient: &[T],
    exp_avg: &mut [T],
    exp_avg_sq: &mut [T],
    update: &Update,
) {
    let clip_value = T::real(update.clip_value);
    let decay = T::real(update.decay);
    let first_share = T::real(update.one_minus_beta1);
    let beta2 = T::real(update.beta2);
    let second_share = T::real(update.one_minus_beta2);
    let step_size = T::real(update.step_size);
    let second_correction = T::real(update.second_correction);
    let eps = T::real(update.eps);
    let elements = parameter
        .iter_mut()
        .zip(gradient)
        .zip(exp_avg)
        .zip(exp_avg_sq);
    for (((p, g), m), v) in elements {
        let g = simd::clamp(*g, clip_value);
        let first = *m + first_share * (g - *m);
        let second = *v * beta2 + second_share * g * g;
        let denominator = second.square_root() / second_correction + eps;
        *p = *p * decay - step_size * first / denominator;
        *m = first;
        *v = second;
    }
}
