//! LayerNorm: y = w * (x - mean) * rstd + b, rstd = 1 / sqrt(var(x) + eps), row by row.

use super::{Real, parallel, simd};

/// `y` and the rows' `statistics`, (mean, rstd) pairs, from `x` (rows, width), `weight` and `bias` (width).
pub fn forward<T: Real>(
    x: &[T],
    weight: &[T],
    bias: &[T],
    eps: f64,
    y: &mut [T],
    statistics: &mut [T],
) {
    let width = weight.len();
    let eps = T::real(eps);
    let share = T::real(1.0 / width as f64);
    parallel::for_rows2(y, width, statistics, 2, |first, y, statistics| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                for ((y, x), statistics) in rows.zip(statistics.chunks_exact_mut(2)) {
                    let mean = simd::sum(x) * share;
                    // Two passes: the mean of squares minus the square of the mean would cancel.
                    let variance = simd::sum_over([x], |[x]| (x - mean) * (x - mean)) * share;
                    let rstd = T::ONE / (variance + eps).square_root();
                    statistics[0] = mean;
                    statistics[1] = rstd;
                    for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                        *y = (*x - mean) * rstd * *w + *b;
                    }
                }
            },
        );
    });
}

/// `dx` (rows, width), `dw` and `db` (width) from `dy` and from what forward had.
///
/// With h = (x - mean) rstd and g = dy w: `dx = rstd (g - mean(g) - h mean(g h))`, `dw = sum dy h`, `db = sum dy`.
#[allow(clippy::too_many_arguments)] // three inputs, the saved statistics, three outputs
pub fn backward<T: Real>(
    dy: &[T],
    x: &[T],
    weight: &[T],
    statistics: &[T],
    dx: &mut [T],
    dw: &mut [T],
    db: &mut [T],
) {
    let width = weight.len();
    let share = T::real(1.0 / width as f64);
    parallel::for_rows(dx, width, |first, dx| {
        let range = first * width..first * width + dx.len();
        let (dy, x) = (&dy[range.clone()], &x[range]);
        let statistics = &statistics[2 * first..];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width));
                let statistics = statistics.chunks_exact(2);
                for (((dx, dy), x), statistics) in rows.zip(x.chunks_exact(width)).zip(statistics) {
                    let (mean, rstd) = (statistics[0], statistics[1]);
                    let g_mean = simd::dot(dy, weight) * share;
                    let gh = simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * (x - mean));
                    let pull = gh * rstd * rstd * share;
                    for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                        *dx = (*dy * *w - g_mean - (*x - mean) * pull) * rstd;
                    }
                }
            },
        );
    });
    let rows = statistics.len() / 2;
    parallel::sum_rows(dw, rows, |row, dw| {
        let range = row * width..(row + 1) * width;
        let (dy, x) = (&dy[range.clone()], &x[range]);
        let (mean, rstd) = (statistics[2 * row], statistics[2 * row + 1]);
        simd::vectorized(
            #[inline(always)]
            || {
                for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                    *dw += *dy * (*x - mean) * rstd;
                }
            },
        );
    });
    parallel::sum_rows(db, rows, |row, db| {
        let dy = &dy[row * width..(row + 1) * width];
        simd::vectorized(
            #[inline(always)]
            || {
                for (db, dy) in db.iter_mut().zip(dy) {
                    *db += *dy;
                }
            },
        );
    });
}
