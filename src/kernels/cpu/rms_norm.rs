//! RMSNorm: y = w * x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), row by row.

use super::{Real, parallel, simd};

/// `y` and `rstd` from `x` (rows, width) and `weight` (width).
pub fn forward<T: Real>(x: &[T], weight: &[T], eps: f64, y: &mut [T], rstd: &mut [T]) {
    let width = weight.len();
    let eps = T::real(eps);
    let mean = T::real(1.0 / width as f64);
    parallel::for_rows2(y, width, rstd, 1, |first, y, rstd| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                for ((y, x), rstd) in rows.zip(rstd) {
                    let scale = T::ONE / (simd::dot(x, x) * mean + eps).square_root();
                    *rstd = scale;
                    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                        *y = *x * scale * *w;
                    }
                }
            },
        );
    });
}

/// `dx` (rows, width) and `dw` (width) from `dy`, and from `x`, `weight` and `rstd` as forward had them.
///
/// With h = x * rstd and g = dy * w: `dx = rstd (g - h mean(g h))`, `dw = sum over rows of dy h`.
pub fn backward<T: Real>(dy: &[T], x: &[T], weight: &[T], rstd: &[T], dx: &mut [T], dw: &mut [T]) {
    let width = weight.len();
    let mean = T::real(1.0 / width as f64);
    parallel::for_rows(dx, width, |first, dx| {
        let range = first * width..first * width + dx.len();
        let (dy, x) = (&dy[range.clone()], &x[range]);
        let rstd = &rstd[first..];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width));
                for (((dx, dy), x), rstd) in rows.zip(x.chunks_exact(width)).zip(rstd) {
                    let inner = simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
                    let pull = inner * mean * *rstd * *rstd;
                    for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                        *dx = (*dy * *w - *x * pull) * *rstd;
                    }
                }
            },
        );
    });
    parallel::sum_rows(dw, rstd.len(), |row, dw| {
        let range = row * width..(row + 1) * width;
        let (dy, x, rstd) = (&dy[range.clone()], &x[range], rstd[row]);
        simd::vectorized(
            #[inline(always)]
            || {
                for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                    *dw += *dy * *x * rstd;
                }
            },
        );
    });
}
