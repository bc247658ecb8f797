//! RMSNorm together with the residual stream that it reads: sum and norm in one pass, and both gradients in one.
//!
//! [`rms_norm`](super::rms_norm) is what these are held against; the bits are the same.

use crate::kernels::cpu::parallel::{self, BLOCK_ROWS, Shared};
use crate::kernels::cpu::{Real, Stored, simd, simd::BLOCK};
use rayon::prelude::*;

/// `y = rms_norm(x)` where y may be of a narrower type, rounded once: x and y (rows, width), weight (width), rstd
/// (rows).
pub fn forward<T: Real, Y: Stored<Wide = T>>(
    x: &[T],
    weight: &[T],
    eps: f64,
    y: &mut [Y],
    rstd: &mut [T],
) {
    let width = weight.len();
    let eps = T::real(eps);
    assert_eq!(x.len(), y.len());
    parallel::for_rows2(y, width, rstd, 1, |first, y, rstd| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
                for ((x, y), rstd) in rows.zip(rstd) {
                    *rstd = norm_row(x, weight, eps, y);
                }
            },
        );
    });
}

/// What one call of [`add_forward`] writes.
pub struct Outputs<'a, T, Y> {
    /// x + branch, (rows, width).
    pub sum: &'a mut [T],
    /// The norm of it, (rows, width).
    pub y: &'a mut [Y],
    /// (rows).
    pub rstd: &'a mut [T],
}

/// `sum = x + branch`, `y = rms_norm(sum)`: x and branch (rows, width), weight (width).
///
/// The branch may be of a narrower type than the stream, and y too, which is then rounded once.
pub fn add_forward<T, S>(x: &[T], branch: &[S], weight: &[T], eps: f64, outputs: Outputs<'_, T, S>)
where
    T: Real,
    S: Stored<Wide = T>,
{
    let width = weight.len();
    let eps = T::real(eps);
    let Outputs { sum, y, rstd } = outputs;
    assert_eq!([x.len(), branch.len(), sum.len()], [y.len(); 3]);
    let rstd = Shared::new(rstd);
    parallel::for_rows2(sum, width, y, width, |first, sum, y| {
        let range = first * width..first * width + y.len();
        let (x, branch) = (&x[range.clone()], &branch[range]);
        // SAFETY: this task's rows.
        let rstd = unsafe { rstd.range(first, y.len() / width) };
        simd::vectorized(
            #[inline(always)]
            || {
                let inputs = x.chunks_exact(width).zip(branch.chunks_exact(width));
                let outputs = sum.chunks_exact_mut(width).zip(y.chunks_exact_mut(width));
                for (((x, branch), (sum, y)), rstd) in inputs.zip(outputs).zip(rstd) {
                    add_row(x, branch, sum);
                    *rstd = norm_row(sum, weight, eps, y);
                }
            },
        );
    });
}

/// `sum = x + branch`.
#[inline(always)]
fn add_row<T: Real, S: Stored<Wide = T>>(x: &[T], branch: &[S], sum: &mut [T]) {
    if let Some(branch) = S::as_wide(branch) {
        for ((sum, x), branch) in sum.iter_mut().zip(x).zip(branch) {
            *sum = *x + *branch;
        }
        return;
    }
    S::load(branch, sum);
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = *x + *sum;
    }
}

/// One row's norm; returns its rstd.
#[inline(always)]
fn norm_row<T: Real, Y: Stored<Wide = T>>(x: &[T], weight: &[T], eps: T, y: &mut [Y]) -> T {
    let mean = T::real(1.0 / weight.len() as f64);
    let scale = T::ONE / (simd::dot(x, x) * mean + eps).square_root();
    if let Some(y) = Y::as_wide_mut(y) {
        scale_row(x, weight, scale, y);
        return scale;
    }
    let mut buffer = [T::ZERO; BLOCK];
    let inputs = x.chunks(BLOCK).zip(weight.chunks(BLOCK));
    for ((x, weight), y) in inputs.zip(y.chunks_mut(BLOCK)) {
        let wide = &mut buffer[..x.len()];
        scale_row(x, weight, scale, wide);
        Y::store(wide, y);
    }
    scale
}

#[inline(always)]
fn scale_row<T: Real>(x: &[T], weight: &[T], scale: T, y: &mut [T]) {
    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
        *y = *x * scale * *w;
    }
}

/// What backward reads, as forward had it.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    /// (rows, width).
    pub x: &'a [T],
    /// (width).
    pub weight: &'a [T],
    /// (rows).
    pub rstd: &'a [T],
}

/// What backward writes.
pub struct Gradients<'a, T> {
    /// (rows, width).
    pub dx: &'a mut [T],
    /// Whether to add to `dx`, which then is the residual stream's gradient so far.
    pub add_dx: bool,
    /// (width).
    pub dw: &'a mut [T],
    /// Whether to add to `dw`.
    pub add_dw: bool,
}

/// How many elements [`backward`] works in, beside its outputs.
pub const fn partials_len(rows: usize, width: usize) -> usize {
    rows.div_ceil(BLOCK_ROWS) * width
}

/// The gradients of x and of the weight from that of the norm's output, dy (rows, width), each row of dy and x read
/// once; `partials` is [`partials_len`] elements to work in.
///
/// dy becomes the output, to the bit what forward gave: so forward's need not be kept. It may be of a narrower type
/// than the stream.
pub fn backward<T: Real, S: Stored<Wide = T>>(
    inputs: Inputs<'_, T>,
    dy: &mut [S],
    gradients: Gradients<'_, T>,
    partials: &mut [T],
) {
    let Inputs { x, weight, rstd } = inputs;
    let Gradients {
        dx,
        add_dx,
        dw,
        add_dw,
    } = gradients;
    let width = weight.len();
    let mean = T::real(1.0 / width as f64);
    let block = BLOCK_ROWS * width;
    assert_eq!(partials.len(), partials_len(rstd.len(), width));
    dx.par_chunks_mut(block)
        .zip(dy.par_chunks_mut(block))
        .zip(partials.par_chunks_exact_mut(width))
        .enumerate()
        .for_each(|(task, ((dx, dy), partial))| {
            let x = &x[task * block..task * block + dx.len()];
            let rstd = &rstd[task * BLOCK_ROWS..];
            simd::vectorized(
                #[inline(always)]
                || {
                    partial.fill(T::ZERO);
                    let mut buffer = [T::ZERO; BLOCK];
                    let rows = dy.chunks_exact_mut(width).zip(x.chunks_exact(width));
                    for ((dx, (dy, x)), rstd) in dx.chunks_exact_mut(width).zip(rows).zip(rstd) {
                        if let Some(dy) = S::as_wide_mut(dy) {
                            let inner = simd::sum_over([&*dy, weight, x], |[dy, w, x]| dy * w * x);
                            let factors = [inner * mean * *rstd * *rstd, *rstd];
                            gradient_row([dy, x, weight], factors, dx, add_dx, partial);
                            scale_row(x, weight, *rstd, dy);
                            continue;
                        }
                        let mut inner = T::ZERO;
                        let inputs = dy.chunks(BLOCK).zip(x.chunks(BLOCK));
                        for ((dy, x), weight) in inputs.zip(weight.chunks(BLOCK)) {
                            let dy = loaded(dy, &mut buffer);
                            inner += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
                        }
                        let factors = [inner * mean * *rstd * *rstd, *rstd];
                        let inputs = dy.chunks_mut(BLOCK).zip(x.chunks(BLOCK));
                        let outputs = dx.chunks_mut(BLOCK).zip(partial.chunks_mut(BLOCK));
                        let blocks = inputs.zip(weight.chunks(BLOCK)).zip(outputs);
                        for (((dy, x), weight), (dx, partial)) in blocks {
                            let wide = loaded(dy, &mut buffer);
                            gradient_row([wide, x, weight], factors, dx, add_dx, partial);
                            let wide = &mut buffer[..x.len()];
                            scale_row(x, weight, *rstd, wide);
                            S::store(wide, dy);
                        }
                    }
                },
            );
        });
    if !add_dw {
        dw.fill(T::ZERO);
    }
    simd::vectorized(
        #[inline(always)]
        || {
            for partial in partials.chunks_exact(width) {
                for (dw, partial) in dw.iter_mut().zip(partial) {
                    *dw += *partial;
                }
            }
        },
    );
}

/// A block in the type computed in.
#[inline(always)]
fn loaded<'b, S: Stored>(x: &[S], buffer: &'b mut [S::Wide; BLOCK]) -> &'b [S::Wide] {
    let wide = &mut buffer[..x.len()];
    S::load(x, wide);
    wide
}

/// One row's gradients, or a part of it: dx, and what it adds to dw. The factors are what x pulls by, and rstd.
#[inline(always)]
fn gradient_row<T: Real>(
    [dy, x, weight]: [&[T]; 3],
    [pull, rstd]: [T; 2],
    dx: &mut [T],
    add_dx: bool,
    dw: &mut [T],
) {
    let terms = dx.iter_mut().zip(dw).zip(dy).zip(x).zip(weight);
    if add_dx {
        for ((((dx, dw), dy), x), w) in terms {
            *dx += (*dy * *w - *x * pull) * rstd;
            *dw += *dy * *x * rstd;
        }
    } else {
        for ((((dx, dw), dy), x), w) in terms {
            *dx = (*dy * *w - *x * pull) * rstd;
            *dw += *dy * *x * rstd;
        }
    }
}

#[cfg(test)]
mod tests;
