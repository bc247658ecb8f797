//! RMSNorm: y = w * x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), row by row.

use crate::kernels::cpu::{Blocks, Real, Stored, parallel, simd};

/// `y` and `rstd` from `x` (rows, width) and `weight` (width).
pub fn forward<T: Stored>(
    x: &[T],
    weight: &[T::Wide],
    eps: f64,
    y: &mut [T],
    rstd: &mut [T::Wide],
) {
    let width = weight.len();
    let eps = T::Wide::real(eps);
    let mean = T::Wide::real(1.0 / width as f64);
    parallel::for_rows2(y, width, rstd, 1, |first, y, rstd| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                let mut writing = Blocks::<T, 1, 1>::new();
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                for ((y, x), rstd) in rows.zip(rstd) {
                    let mut squares = T::Wide::ZERO;
                    reading.each(
                        [x],
                        [],
                        #[inline(always)]
                        |_, [x], []| squares += simd::dot(x, x),
                    );
                    let scale = T::Wide::ONE / (squares * mean + eps).square_root();
                    *rstd = scale;
                    writing.each(
                        [x],
                        [y],
                        #[inline(always)]
                        |start, [x], [y]| {
                            for ((y, x), w) in y.iter_mut().zip(x).zip(&weight[start..]) {
                                *y = *x * scale * *w;
                            }
                        },
                    );
                }
            },
        );
    });
}

/// `dx` (rows, width) and `dw` (width) from `dy`, and from `x`, `weight` and `rstd` as forward had them.
///
/// With h = x * rstd and g = dy * w: `dx = rstd (g - h mean(g h))`, `dw = sum over rows of dy h`.
pub fn backward<T: Stored>(
    dy: &[T],
    x: &[T],
    weight: &[T::Wide],
    rstd: &[T::Wide],
    dx: &mut [T],
    dw: &mut [T::Wide],
) {
    let width = weight.len();
    let mean = T::Wide::real(1.0 / width as f64);
    parallel::for_rows(dx, width, |first, dx| {
        let range = first * width..first * width + dx.len();
        let (dy, x) = (&dy[range.clone()], &x[range]);
        let rstd = &rstd[first..];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 2, 0>::new();
                let mut writing = Blocks::<T, 2, 1>::new();
                let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width));
                for (((dx, dy), x), rstd) in rows.zip(x.chunks_exact(width)).zip(rstd) {
                    let mut inner = T::Wide::ZERO;
                    reading.each(
                        [dy, x],
                        [],
                        #[inline(always)]
                        |start, [dy, x], []| {
                            let weight = &weight[start..start + x.len()];
                            inner += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
                        },
                    );
                    let pull = inner * mean * *rstd * *rstd;
                    writing.each(
                        [dy, x],
                        [dx],
                        #[inline(always)]
                        |start, [dy, x], [dx]| {
                            let terms = dx.iter_mut().zip(dy).zip(x);
                            for (((dx, dy), x), w) in terms.zip(&weight[start..]) {
                                *dx = (*dy * *w - *x * pull) * *rstd;
                            }
                        },
                    );
                }
            },
        );
    });
    parallel::sum_rows(dw, rstd.len(), |rows, dw| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 2, 0>::new();
                for row in rows {
                    let range = row * width..(row + 1) * width;
                    let rstd = rstd[row];
                    reading.each(
                        [&dy[range.clone()], &x[range]],
                        [],
                        #[inline(always)]
                        |start, [dy, x], []| {
                            for ((dw, dy), x) in dw[start..].iter_mut().zip(dy).zip(x) {
                                *dw += *dy * *x * rstd;
                            }
                        },
                    );
                }
            },
        );
    });
}
