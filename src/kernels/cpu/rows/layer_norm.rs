//! LayerNorm: y = w * (x - mean) * rstd + b, rstd = 1 / sqrt(var(x) + eps), row by row.

use crate::kernels::cpu::{Blocks, Real, Stored, parallel, simd};

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
    let share = T::Wide::real(1.0 / width as f64);
    parallel::for_rows2(y, width, statistics, 2, |first, y, statistics| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                let mut writing = Blocks::<T, 1, 1>::new();
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                for ((y, x), statistics) in rows.zip(statistics.chunks_exact_mut(2)) {
                    let mut sum = T::Wide::ZERO;
                    reading.each(
                        [x],
                        [],
                        #[inline(always)]
                        |_, [x], []| sum += simd::sum(x),
                    );
                    let mean = sum * share;
                    // Two passes: the mean of squares minus the square of the mean would cancel.
                    let mut squares = T::Wide::ZERO;
                    reading.each(
                        [x],
                        [],
                        #[inline(always)]
                        |_, [x], []| {
                            squares += simd::sum_over([x], |[x]| (x - mean) * (x - mean));
                        },
                    );
                    let rstd = T::Wide::ONE / (squares * share + eps).square_root();
                    statistics[0] = mean;
                    statistics[1] = rstd;
                    writing.each(
                        [x],
                        [y],
                        #[inline(always)]
                        |start, [x], [y]| {
                            let terms = y.iter_mut().zip(x).zip(&weight[start..]);
                            for (((y, x), w), b) in terms.zip(&bias[start..]) {
                                *y = (*x - mean) * rstd * *w + *b;
                            }
                        },
                    );
                }
            },
        );
    });
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
    let share = T::Wide::real(1.0 / width as f64);
    parallel::for_rows(dx, width, |first, dx| {
        let range = first * width..first * width + dx.len();
        let (dy, x) = (&dy[range.clone()], &x[range]);
        let statistics = &statistics[2 * first..];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 2, 0>::new();
                let mut writing = Blocks::<T, 2, 1>::new();
                let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width));
                let statistics = statistics.chunks_exact(2);
                for (((dx, dy), x), statistics) in rows.zip(x.chunks_exact(width)).zip(statistics) {
                    let (mean, rstd) = (statistics[0], statistics[1]);
                    let (mut g, mut gh) = (T::Wide::ZERO, T::Wide::ZERO);
                    reading.each(
                        [dy, x],
                        [],
                        #[inline(always)]
                        |start, [dy, x], []| {
                            let weight = &weight[start..start + x.len()];
                            g += simd::dot(dy, weight);
                            gh += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * (x - mean));
                        },
                    );
                    let g_mean = g * share;
                    let pull = gh * rstd * rstd * share;
                    writing.each(
                        [dy, x],
                        [dx],
                        #[inline(always)]
                        |start, [dy, x], [dx]| {
                            let terms = dx.iter_mut().zip(dy).zip(x);
                            for (((dx, dy), x), w) in terms.zip(&weight[start..]) {
                                *dx = (*dy * *w - g_mean - (*x - mean) * pull) * rstd;
                            }
                        },
                    );
                }
            },
        );
    });
    let rows = statistics.len() / 2;
    parallel::sum_rows(dw, rows, |rows, dw| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 2, 0>::new();
                for row in rows {
                    let range = row * width..(row + 1) * width;
                    let (mean, rstd) = (statistics[2 * row], statistics[2 * row + 1]);
                    reading.each(
                        [&dy[range.clone()], &x[range]],
                        [],
                        #[inline(always)]
                        |start, [dy, x], []| {
                            for ((dw, dy), x) in dw[start..].iter_mut().zip(dy).zip(x) {
                                *dw += *dy * (*x - mean) * rstd;
                            }
                        },
                    );
                }
            },
        );
    });
    parallel::sum_rows(db, rows, |rows, db| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                for row in rows {
                    reading.each(
                        [&dy[row * width..(row + 1) * width]],
                        [],
                        #[inline(always)]
                        |start, [dy], []| {
                            for (db, dy) in db[start..].iter_mut().zip(dy) {
                                *db += *dy;
                            }
                        },
                    );
                }
            },
        );
    });
}
