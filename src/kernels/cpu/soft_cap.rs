//! Soft capping of scores and logits, and its gradient. Backward reads only the input.

use super::activation::sigmoids;
use super::elementwise::each;
use super::{Real, Stored};

/// Computes `y = cap tanh(scale x / cap)`; slices of one length.
pub fn forward<T: Stored>(scale: f64, cap: f64, x: &[T], y: &mut [T]) {
    let (by, cap) = (T::Wide::real(scale / cap), T::Wide::real(cap));
    each(
        [x],
        y,
        #[inline(always)]
        |[x]| cap * (x * by).hyperbolic_tangent(),
    );
}

/// Computes `dx = dy scale (1 - tanh(scale x / cap)^2)`; slices of one length.
pub fn backward<T: Stored>(scale: f64, cap: f64, dy: &[T], x: &[T], dx: &mut [T]) {
    let (double, scale) = (T::Wide::real(2.0 * scale / cap), T::Wide::real(4.0 * scale));
    each(
        [dy, x],
        dx,
        #[inline(always)]
        |[dy, x]| {
            let (above, below) = sigmoids(x * double); // 1 - tanh^2 without cancellation
            dy * scale * above * below
        },
    );
}
