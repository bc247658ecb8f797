//! Contiguous copies of views.

use super::cast::operand;
use super::record;
use crate::Result;
use candle_core::Tensor;

/// Returns `x` with contiguous elements: itself if it is contiguous, else a copy. It is needed before `reshape` of a
/// transposed or narrowed tensor; unlike candle's own copy it works in a [trace](crate::graph) too.
///
/// Backward returns the gradient unchanged. Saved for backward: nothing. Autocast: any dtype, also an integer, stays
/// unchanged.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let y = tallow::ops::contiguous(&x.t()?)?.reshape(4)?;
/// assert_eq!(y.to_vec1::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Views of more elements than can be counted or fit the memory.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    Ok(record::contiguous(&operand("contiguous", x)?)?)
}
