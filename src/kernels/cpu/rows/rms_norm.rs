//! RMSNorm: y = w * x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), row by row.

use super::each::{each_row, sum_rows};
use crate::kernels::cpu::{Real, Stored, simd};

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
    let inv_width = T::Wide::real(1.0 / width as f64);
    each_row(
        width,
        [x],
        y,
        rstd,
        #[inline(always)]
        |_, mut row| {
            let mut squares = T::Wide::ZERO;
            row.read(
                #[inline(always)]
                |_, [x]| squares += simd::dot(x, x),
            );
            let rstd = T::Wide::ONE / (squares * inv_width + eps).square_root();
            row.write(
                #[inline(always)]
                |start, [x], y| {
                    for ((y, x), w) in y.iter_mut().zip(x).zip(&weight[start..]) {
                        *y = *x * rstd * *w;
                    }
                },
            );
            [rstd]
        },
    );
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
    let inv_width = T::Wide::real(1.0 / width as f64);
    each_row(
        width,
        [dy, x],
        dx,
        &mut [],
        #[inline(always)]
        |i, mut row| {
            let rstd = rstd[i];
            let mut inner = T::Wide::ZERO;
            row.read(
                #[inline(always)]
                |start, [dy, x]| {
                    let weight = &weight[start..start + x.len()];
                    inner += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
                },
            );
            let pull = inner * inv_width * rstd * rstd;
            row.write(
                #[inline(always)]
                |start, [dy, x], dx| {
                    let terms = dx.iter_mut().zip(dy).zip(x);
                    for (((dx, dy), x), w) in terms.zip(&weight[start..]) {
                        *dx = (*dy * *w - *x * pull) * rstd;
                    }
                },
            );
            []
        },
    );
    sum_rows(
        [dy, x],
        dw,
        #[inline(always)]
        |i, [dy, x], dw| {
            let rstd = rstd[i];
            for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                *dw += *dy * *x * rstd;
            }
        },
    );
}
