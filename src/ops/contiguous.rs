//! A view's elements in order.

use super::cast::operand;
use super::record;
use crate::Result;
use candle_core::Tensor;

/// `x` with its elements in order, one after another: itself where they are, else a copy. What `reshape` of a
/// transposed or narrowed tensor needs before it, in a [trace](crate::graph) too, where candle's own copy is an error.
///
/// Backward hands the gradient on. Nothing is kept for it. Autocast: any dtype, integers too, stays what it is.
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
/// Views of more elements than can be counted, or than there is memory for.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    Ok(record::contiguous(&operand("contiguous", x)?)?)
}
