//! LayerNorm: y = w * (x - mean) * rstd + b, rstd = 1 / sqrt(var(x) + eps), row by row.

use super::bias;
use super::each::{each_row, sum_rows};
use crate::kernels::cpu::{Real, Stored, simd};

/// `y` and the rows' `statistics`, (mean, rstd) pairs, from `x` (rows, width), `weight` and `bias` (width).
pub fn forward<T: Stored>(
    x: &[T],
    weight: &[T::Wide],
    bias: &[T::Wide],
    eps: f64,
    y: &mut [T],
    statistics: &mut [T::Wide],
) {
    let width = weight.len();
    let eps = T::Wide::real(eps);
    let inv_width = T::Wide::real(1.0 / width as f64);
    each_row(
        width,
        [x],
        y,
        statistics,
        #[inline(always)]
        |_, mut row| {
            let mut sum = T::Wide::ZERO;
            row.read(
                #[inline(always)]
                |_, [x]| sum += simd::sum(x),
            );
            let mean = sum * inv_width;
            // Two passes: the mean of squares minus the square of the mean would cancel.
            let mut squares = T::Wide::ZERO;
            row.read(
                #[inline(always)]
                |_, [x]| squares += simd::sum_over([x], |[x]| (x - mean) * (x - mean)),
            );
            let rstd = T::Wide::ONE / (squares * inv_width + eps).square_root();
            row.write(
                #[inline(always)]
                |start, [x], y| {
                    let terms = y.iter_mut().zip(x).zip(&weight[start..]);
                    for (((y, x), w), b) in terms.zip(&bias[start..]) {
                        *y = (*x - mean) * rstd * *w + *b;
                    }
                },
            );
            [mean, rstd]
        },
    );
}

/// `dx` (rows, width), `dw` and `db` (width) from `dy` and from what forward had.
///
/// With h = (x - mean) rstd and g = dy w: `dx = rstd (g - mean(g) - h mean(g h))`, `dw = sum dy h`, `db = sum dy`.
#[allow(clippy::too_many_arguments)] // three inputs, the saved statistics, three outputs
pub fn backward<T: Stored>(
    dy: &[T],
    x: &[T],
    weight: &[T::Wide],
    statistics: &[T::Wide],
    dx: &mut [T],
    dw: &mut [T::Wide],
    db: &mut [T::Wide],
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
            let (mean, rstd) = (statistics[2 * i], statistics[2 * i + 1]);
            let (mut g, mut gh) = (T::Wide::ZERO, T::Wide::ZERO);
            row.read(
                #[inline(always)]
                |start, [dy, x]| {
                    let weight = &weight[start..start + x.len()];
                    g += simd::dot(dy, weight);
                    gh += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * (x - mean));
                },
            );
            let g_mean = g * inv_width;
            let pull = gh * rstd * rstd * inv_width;
            row.write(
                #[inline(always)]
                |start, [dy, x], dx| {
                    let terms = dx.iter_mut().zip(dy).zip(x);
                    for (((dx, dy), x), w) in terms.zip(&weight[start..]) {
                        *dx = (*dy * *w - g_mean - (*x - mean) * pull) * rstd;
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
            let (mean, rstd) = (statistics[2 * i], statistics[2 * i + 1]);
            for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                *dw += *dy * (*x - mean) * rstd;
            }
        },
    );
    bias::gradient(dy, db);
}
