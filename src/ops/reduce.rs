//! Sums and means over a whole tensor, and log-softmax.

use super::elementwise::in_f32;
use crate::{Error, Result};
use candle_core::{D, Tensor};

/// The sum of all elements, a scalar.
///
/// Half precision is summed in f32 and rounded once, where candle's own sum stops growing at 256 ones in bf16; under
/// CUDA's autocast policy the sum is f32.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let ones = Tensor::ones((4096,), DType::BF16, &Device::Cpu)?;
/// assert_eq!(tallow::ops::sum(&ones)?.to_dtype(DType::F32)?.to_scalar::<f32>()?, 4096.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn sum(x: &Tensor) -> Result<Tensor> {
    in_f32("sum", x, (), Tensor::sum_all)
}

/// The mean of all elements, a scalar: summed in f32 at least, returned in x's dtype under both of PyTorch's policies.
///
/// # Errors
/// A dtype that is not a float, an empty tensor.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    if x.dims().contains(&0) {
        return Err(Error::Shape {
            op: "mean",
            expected: "at least one element".into(),
            got: format!("{:?}", x.dims()),
            hint: "a mean of nothing is no number".into(),
        });
    }
    in_f32("mean", x, (), Tensor::mean_all)
}

/// `y = x - log(sum(exp(x)))` along the last dimension: x and y (..., V). A scalar is one element, as in PyTorch.
///
/// In plain candle ops, half precision computed in f32 and rounded once. For a loss, [`cross_entropy`](super::cross_entropy())
/// keeps far less for backward.
///
/// # Errors
/// A dtype that is not a float.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    in_f32("log_softmax", x, x.shape(), |x| {
        if x.elem_count() == 0 {
            return Ok(x.clone()); // candle refuses to reduce nothing
        }
        if x.rank() == 0 {
            let row = x.reshape(1)?;
            return log_probabilities(&row)?.reshape(());
        }
        log_probabilities(x)
    })
}

fn log_probabilities(x: &Tensor) -> candle_core::Result<Tensor> {
    let centred = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let total = centred.exp()?.sum_keepdim(D::Minus1)?;
    centred.broadcast_sub(&total.log()?)
}
