//! Elementwise activations and their gradients. Backward reads only the input: recomputing an exponential is cheaper
//! than saving another tensor.

use super::elementwise::each;
use super::{Real, Stored};
use crate::kernels::Activation;
use std::f64::consts::{FRAC_2_SQRT_PI, SQRT_2};

/// Computes `y = f(x)`; slices of one length.
pub fn forward<T: Stored>(f: Activation, x: &[T], y: &mut [T]) {
    match f {
        Activation::Tanh => each(
            [x],
            y,
            #[inline(always)]
            |[x]| x.hyperbolic_tangent(),
        ),
        Activation::Sigmoid => each(
            [x],
            y,
            #[inline(always)]
            |[x]| sigmoids(x).0,
        ),
        Activation::LogSigmoid => each(
            [x],
            y,
            #[inline(always)]
            |[x]| {
                let e = (if x < T::Wide::ZERO { x } else { -x }).exponential();
                let below = if x > T::Wide::ZERO { T::Wide::ZERO } else { x };
                below - log_1p(e)
            },
        ),
        Activation::Silu => each(
            [x],
            y,
            #[inline(always)]
            |[x]| x * sigmoids(x).0,
        ),
        Activation::Gelu => each(
            [x],
            y,
            #[inline(always)]
            |[x]| x * x.normal_cdf(bell(x)),
        ),
        Activation::GeluTanh => each(
            [x],
            y,
            #[inline(always)]
            |[x]| x * sigmoids(twice_u(x)).0,
        ),
    }
}

/// Computes `dx = dy f'(x)`; slices of one length.
pub fn backward<T: Stored>(f: Activation, dy: &[T], x: &[T], dx: &mut [T]) {
    match f {
        Activation::Tanh => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| {
                let (above, below) = sigmoids(x + x); // 1 - tanh^2 without cancelling
                dy * T::Wide::real(4.0) * above * below
            },
        ),
        Activation::Sigmoid => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| {
                let (s, rest) = sigmoids(x);
                dy * s * rest
            },
        ),
        Activation::LogSigmoid => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| dy * sigmoids(x).1,
        ),
        Activation::Silu => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| {
                let (s, rest) = sigmoids(x);
                dy * (s + x * s * rest)
            },
        ),
        Activation::Gelu => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| {
                let e = bell(x);
                dy * (x.normal_cdf(e) + x * density(e))
            },
        ),
        Activation::GeluTanh => each(
            [dy, x],
            dx,
            #[inline(always)]
            |[dy, x]| {
                let (s, rest) = sigmoids(twice_u(x));
                dy * (s + x * s * rest * twice_u_slope(x))
            },
        ),
    }
}

/// Returns sigmoid(x) and sigmoid(-x) without cancellation or overflow.
#[inline(always)]
pub(super) fn sigmoids<T: Real>(x: T) -> (T, T) {
    let e = (if x < T::ZERO { x } else { -x }).exponential();
    let large = T::ONE / (T::ONE + e);
    let small = e * large;
    if x < T::ZERO {
        (small, large)
    } else {
        (large, small)
    }
}

/// Returns log(1 + e) for e from 0 to 1. The rounding error of 1 + e cancels in the quotient.
#[inline(always)]
fn log_1p<T: Real>(e: T) -> T {
    let sum = T::ONE + e;
    let rounded = sum - T::ONE;
    if rounded == T::ZERO {
        e
    } else {
        sum.logarithm() * (e / rounded)
    }
}

/// exp(-x^2 / 2).
#[inline(always)]
fn bell<T: Real>(x: T) -> T {
    (-(x * x) * T::real(0.5)).exponential()
}

/// Returns the standard normal density at x, from `e = exp(-x^2 / 2)`.
#[inline(always)]
pub(super) fn density<T: Real>(e: T) -> T {
    e * T::real(FRAC_2_SQRT_PI / SQRT_2 / 2.0)
}

/// 2 sqrt(2 / pi).
pub(super) const SLOPE: f64 = FRAC_2_SQRT_PI * SQRT_2;
/// The coefficient of the cubic term in GELU's tanh approximation, as in PyTorch.
pub(super) const CUBE: f64 = 0.044715;

#[inline(always)]
fn twice_u<T: Real>(x: T) -> T {
    x * (T::real(SLOPE) + T::real(SLOPE * CUBE) * (x * x))
}

/// Returns the derivative of [`twice_u`]. x is clamped to 64 in magnitude: beyond that the caller multiplies it by 0,
/// so it must not be infinite.
#[inline(always)]
pub(super) fn twice_u_slope<T: Real>(x: T) -> T {
    let end = T::real(64.0 * 64.0);
    let square = x * x;
    let square = if square > end { end } else { square };
    T::real(SLOPE) + T::real(3.0 * SLOPE * CUBE) * square
}
