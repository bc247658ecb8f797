//! relu(x) = max(x, 0).

use super::elementwise::each;
use super::{Real, Stored};

/// `y = max(x, 0)`; a NaN stays one.
pub fn forward<T: Stored>(x: &[T], y: &mut [T]) {
    each(
        [x],
        y,
        #[inline(always)]
        |[x]| if x < T::Wide::ZERO { T::Wide::ZERO } else { x },
    );
}

/// `dx = 0` where the output was 0, else dy: at an input of 0 nothing passes, at NaN everything, as in PyTorch.
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
