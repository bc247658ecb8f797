//! RMSNorm together with the residual stream that it reads: sum and norm in one pass, and both gradients in one.
//!
//! [`rms_norm`](super::rms_norm) is what these are held against; the bits are the same.

use super::parallel::{self, BLOCK_ROWS, Shared};
use super::{Real, simd};
use rayon::prelude::*;

/// What one call of [`add_forward`] writes.
pub struct Outputs<'a, T> {
    /// x + branch, (rows, width).
    pub sum: &'a mut [T],
    /// The norm of it, (rows, width).
    pub y: &'a mut [T],
    /// (rows).
    pub rstd: &'a mut [T],
}

/// `sum = x + branch`, `y = rms_norm(sum)`: x and branch (rows, width), weight (width).
pub fn add_forward<T: Real>(
    x: &[T],
    branch: &[T],
    weight: &[T],
    eps: f64,
    outputs: Outputs<'_, T>,
) {
    let width = weight.len();
    let (eps, mean) = (T::real(eps), T::real(1.0 / width as f64));
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
                    for ((sum, x), branch) in sum.iter_mut().zip(x).zip(branch) {
                        *sum = *x + *branch;
                    }
                    let squares = simd::dot(sum, sum);
                    let scale = T::ONE / (squares * mean + eps).square_root();
                    *rstd = scale;
                    for ((y, x), w) in y.iter_mut().zip(sum.iter()).zip(weight) {
                        *y = *x * scale * *w;
                    }
                }
            },
        );
    });
}

/// What backward reads, as forward had it.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    /// The gradient of the norm's output, (rows, width).
    pub dy: &'a [T],
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

/// The gradients of x and of the weight, each row of dy and x read once; `partials` is [`partials_len`] elements to work in.
pub fn backward<T: Real>(inputs: Inputs<'_, T>, gradients: Gradients<'_, T>, partials: &mut [T]) {
    let Inputs {
        dy,
        x,
        weight,
        rstd,
    } = inputs;
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
        .zip(partials.par_chunks_exact_mut(width))
        .enumerate()
        .for_each(|(task, (dx, partial))| {
            let range = task * block..task * block + dx.len();
            let (dy, x) = (&dy[range.clone()], &x[range]);
            let rstd = &rstd[task * BLOCK_ROWS..];
            simd::vectorized(
                #[inline(always)]
                || {
                    partial.fill(T::ZERO);
                    let rows = dy.chunks_exact(width).zip(x.chunks_exact(width));
                    for ((dx, (dy, x)), rstd) in dx.chunks_exact_mut(width).zip(rows).zip(rstd) {
                        let inner = simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
                        let pull = inner * mean * *rstd * *rstd;
                        let terms = dx.iter_mut().zip(partial.iter_mut());
                        let terms = terms.zip(dy).zip(x).zip(weight);
                        if add_dx {
                            for ((((dx, dw), dy), x), w) in terms {
                                *dx += (*dy * *w - *x * pull) * *rstd;
                                *dw += *dy * *x * *rstd;
                            }
                        } else {
                            for ((((dx, dw), dy), x), w) in terms {
                                *dx = (*dy * *w - *x * pull) * *rstd;
                                *dw += *dy * *x * *rstd;
                            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::rms_norm;

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
    }

    /// The same bits as a sum and [`rms_norm`], for rows of every kind of length.
    #[test]
    fn as_the_unfused() {
        for (rows, width) in [(1, 1), (3, 24), (33, 40), (100, 512), (257, 129)] {
            let n = rows * width;
            let (x, branch, dy) = (wave(n, 0.0), wave(n, 1.0), wave(n, 2.0));
            let weight = wave(width, 3.0);
            let sum: Vec<f32> = x.iter().zip(&branch).map(|(x, b)| x + b).collect();
            let (mut y, mut rstd) = (vec![0f32; n], vec![0f32; rows]);
            rms_norm::forward(&sum, &weight, 1e-5, &mut y, &mut rstd);
            let (mut dx, mut dw) = (vec![0f32; n], vec![0f32; width]);
            rms_norm::backward(&dy, &sum, &weight, &rstd, &mut dx, &mut dw);

            let (mut got_sum, mut got_y) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            let mut got_rstd = vec![f32::NAN; rows];
            let outputs = Outputs {
                sum: &mut got_sum,
                y: &mut got_y,
                rstd: &mut got_rstd,
            };
            add_forward(&x, &branch, &weight, 1e-5, outputs);
            assert_eq!((got_sum, got_y, &got_rstd), (sum.clone(), y, &rstd));

            for add in [false, true] {
                // Not read where nothing is added.
                let before = if add { 0.5 } else { f32::NAN };
                let (mut got_dx, mut got_dw) = (vec![before; n], vec![before; width]);
                let mut partials = vec![f32::NAN; partials_len(rows, width)];
                let inputs = Inputs {
                    dy: &dy,
                    x: &sum,
                    weight: &weight,
                    rstd: &rstd,
                };
                let gradients = Gradients {
                    dx: &mut got_dx,
                    add_dx: add,
                    dw: &mut got_dw,
                    add_dw: add,
                };
                backward(inputs, gradients, &mut partials);
                if add {
                    let plus = |v: &[f32]| v.iter().map(|v| v + 0.5).collect::<Vec<f32>>();
                    assert_eq!(got_dx, plus(&dx));
                    for (got, wanted) in got_dw.iter().zip(plus(&dw)) {
                        assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0));
                    }
                } else {
                    assert_eq!((got_dx, got_dw), (dx.clone(), dw.clone()));
                }
            }
        }
    }
}
