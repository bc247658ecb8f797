//! Elementwise arithmetic on slices of one length.

use super::elementwise::each;
use super::simd::BLOCK;
use super::{Real, Stored, parallel, simd};

/// `y = a + b`.
pub fn add<T: Stored>(a: &[T], b: &[T], y: &mut [T]) {
    each(
        [a, b],
        y,
        #[inline(always)]
        |[a, b]| a + b,
    );
}

/// `sum = sum + x`, rounded once in half precision.
pub fn add_onto<T: Stored>(sum: &mut [T], x: &[T]) {
    assert_eq!(sum.len(), x.len());
    parallel::for_rows(sum, 1, |first, part| {
        let x = &x[first..first + part.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut wide = [[T::Wide::ZERO; BLOCK]; 2];
                for (sum, x) in part.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
                    let [a, b] = wide.each_mut().map(|block| &mut block[..x.len()]);
                    T::load(sum, a);
                    T::load(x, b);
                    a.iter_mut().zip(b.iter()).for_each(|(a, b)| *a += *b);
                    T::store(a, sum);
                }
            },
        );
    });
}

/// `y = a - b`.
pub fn sub<T: Stored>(a: &[T], b: &[T], y: &mut [T]) {
    each(
        [a, b],
        y,
        #[inline(always)]
        |[a, b]| a - b,
    );
}

/// `y = a * b`.
pub fn mul<T: Stored>(a: &[T], b: &[T], y: &mut [T]) {
    each(
        [a, b],
        y,
        #[inline(always)]
        |[a, b]| a * b,
    );
}

/// `y = a / b`.
pub fn div<T: Stored>(a: &[T], b: &[T], y: &mut [T]) {
    each([a, b], y, |[a, b]| a / b);
}

/// `y = -a / b`.
pub fn negated_div<T: Stored>(a: &[T], b: &[T], y: &mut [T]) {
    each([a, b], y, |[a, b]| -a / b);
}

/// `y = -a`; b is not read.
pub fn negated<T: Stored>(a: &[T], _b: &[T], y: &mut [T]) {
    each([a], y, |[a]| -a);
}

/// `y = a + scale * b`, rounded once in half precision.
pub fn add_scaled<T: Stored>(a: &[T], b: &[T], scale: f64, y: &mut [T]) {
    let scale = T::Wide::real(scale);
    each(
        [a, b],
        y,
        #[inline(always)]
        |[a, b]| a + scale * b,
    );
}

/// `y = scale * a`, rounded once in half precision.
pub fn scaled<T: Stored>(a: &[T], scale: f64, y: &mut [T]) {
    let scale = T::Wide::real(scale);
    each([a], y, |[a]| scale * a);
}

/// `y = exp(a)`.
pub fn exp<T: Stored>(a: &[T], y: &mut [T]) {
    each([a], y, |[a]| a.exponential());
}

/// `y = ln(a)`.
pub fn log<T: Stored>(a: &[T], y: &mut [T]) {
    each([a], y, |[a]| a.logarithm());
}

/// `y = a^exponent`, rounded once in half precision.
pub fn pow<T: Stored>(a: &[T], exponent: f64, y: &mut [T]) {
    let exponent = T::Wide::real(exponent);
    each([a], y, |[a]| a.power(exponent));
}

/// `dx = dy exponent x^(exponent - 1)`.
pub fn pow_backward<T: Stored>(dy: &[T], x: &[T], exponent: f64, dx: &mut [T]) {
    let exponent = T::Wide::real(exponent);
    each([dy, x], dx, |[dy, x]| {
        dy * x.power(exponent - T::Wide::ONE) * exponent
    });
}

/// `y = 1 / sqrt(a)`.
pub fn rsqrt<T: Stored>(a: &[T], y: &mut [T]) {
    each([a], y, |[a]| T::Wide::ONE / a.square_root());
}

/// `dx = -dy y^3 / 2` with `y = 1 / sqrt(x)`.
pub fn rsqrt_backward<T: Stored>(dy: &[T], x: &[T], dx: &mut [T]) {
    let minus_half = T::Wide::real(-0.5);
    each([dy, x], dx, |[dy, x]| {
        let y = T::Wide::ONE / x.square_root();
        minus_half * dy * y * y * y
    });
}

/// `y = sqrt(a)`.
pub fn sqrt<T: Stored>(a: &[T], y: &mut [T]) {
    each([a], y, |[a]| a.square_root());
}

/// `dx = dy / (2 sqrt(x))`.
pub fn sqrt_backward<T: Stored>(dy: &[T], x: &[T], dx: &mut [T]) {
    let half = T::Wide::real(0.5);
    each([dy, x], dx, |[dy, x]| half * dy / x.square_root());
}

/// `y = |a|`.
pub fn abs<T: Stored>(a: &[T], y: &mut [T]) {
    let zero = T::Wide::ZERO;
    each([a], y, |[a]| if a <= zero { zero - a } else { a });
}

/// `dx = dy sign(x)`, 0 where x is 0.
pub fn abs_backward<T: Stored>(dy: &[T], x: &[T], dx: &mut [T]) {
    let zero = T::Wide::ZERO;
    each([dy, x], dx, |[dy, x]| {
        let (above, below) = (
            if x > zero { dy } else { zero },
            if x < zero { dy } else { zero },
        );
        above - below
    });
}

/// `y = min(max(a, lowest), highest)`; NaN stays NaN.
pub fn clamp<T: Stored>(a: &[T], bounds: [f64; 2], y: &mut [T]) {
    let [lowest, highest] = bounds.map(T::Wide::real);
    each([a], y, |[a]| {
        let a = if a < lowest { lowest } else { a };
        if a > highest { highest } else { a }
    });
}

/// dx is dy where x is strictly between the bounds, else 0.
pub fn clamp_backward<T: Stored>(dy: &[T], x: &[T], bounds: [f64; 2], dx: &mut [T]) {
    let [lowest, highest] = bounds.map(T::Wide::real);
    each([dy, x], dx, |[dy, x]| {
        if x > lowest && x < highest {
            dy
        } else {
            T::Wide::ZERO
        }
    });
}

/// `y = scale a + summand`, rounded once in half precision.
pub fn affine<T: Stored>(a: &[T], numbers: [f64; 2], y: &mut [T]) {
    let [scale, summand] = numbers.map(T::Wide::real);
    each([a], y, |[a]| scale * a + summand);
}
