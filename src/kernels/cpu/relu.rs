//! ReLU: relu(x) = max(x, 0).

use super::elementwise::each;
use super::{Real, Stored};

/// Computes `y = max(x, 0)`; NaN stays NaN.
pub fn forward<T: Stored>(x: &[T], y: &mut [T]) {
    each(
        [x],
        y,
        #[inline(always)]
        |[x]| if x < T::Wide::ZERO { T::Wide::ZERO } else { x },
    );
}

/// Computes dx, which is 0 where the output is 0, else dy. So the gradient is 0 at an input of 0 and dy at NaN, as in
/// PyTorch.
pub fn backward<T: Stored>(dy: &[T], y: &[T], dx: &mut [T]) {
    each(
        [dy, y],
        dx,
        #[inline(always)]
        |[dy, y]| {
            if y <= T::Wide::ZERO {
                T::Wide::ZERO
            } else {
                dy
            }
        },
    );
}
