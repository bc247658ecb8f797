//! Linear maps with bias, y = x W^T + b.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?; // (..., in)
//! let weight = Tensor::ones((5, 4), DType::F32, &Device::Cpu)?; // (out, in)
//! let bias = Tensor::ones(5, DType::F32, &Device::Cpu)?; // (out)
//! let y = ops::linear_bias(&x, &weight, &bias)?;
//! assert_eq!(y.dims(), [2, 3, 5]);
//! assert_eq!(y.max_all()?.to_scalar::<f32>()?, 5.0);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::operand;
use super::dispatch::{check_same, check_same_or_f32};
use super::info::OpInfo;
use super::linear::{LOWERING, Linear, rows_of, with_last_dim};
use super::operand::{check_size, zeros_of};
use super::record::{run, wide_input};
use super::weight::with_copies;
use crate::{Error, Result};
use candle_core::Tensor;

/// Computes a linear map with a bias: `y = x W^T + b`, with x (..., in), W (out, in), b (out), y (..., out).
///
/// Backward: `dx = dy W`, `dW = dy^T x`, and `db` the sum of dy's rows, in at least f32, rounded once. Saved for
/// backward: x and W. The matmul accumulates onto the bias in place, so that half precision is rounded once.
///
/// Autocast: lower under both policies, as [`linear`](super::linear()). With x in half precision the bias may be in
/// f32, and a region does not cast it: it is rounded to x's dtype when it is read, as in PyTorch; its gradient stays
/// f32.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[[1f32, 0.0], [1.0, 1.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[10f32, 20.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::linear_bias(&x, &w, &b)?.to_vec2::<f32>()?, [[11.0, 23.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight that is not a matrix; a last dimension that is not the weight's `in`; a bias that is not (out); mixed
/// devices; mixed dtypes, except for an f32 bias with half precision.
pub fn linear_bias(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (x, [weight], copies) = with_copies(&INFO, x, [weight])?;
    let bias = operand("linear_bias", bias)?;
    check(&x, &copies[0].of(&weight), &bias)?;
    run(&INFO, Linear { copies }, [&x, &weight, &bias], || {
        reference(&x, &weight, &bias)
    })
}

/// Computes [`linear_bias()`] in candle's own ops: half precision is widened, and the sum rounded once.
///
/// # Errors
/// Those of [`linear_bias()`].
pub fn reference(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    check(x, weight, bias)?;
    let dtype = x.dtype();
    let [x, weight, wide_bias] = [x, weight, bias].map(|x| wide_input("linear_bias", x));
    let (x, weight, bias) = (x?, weight?, wide_bias?);
    let (out, depth) = weight.dims2()?;
    let shape = with_last_dim(x.dims(), out);
    let product = match depth {
        0 => zeros_of("linear_bias", shape, x.dtype(), &[&x, &weight])?,
        _ => x
            .reshape((rows_of(&shape), depth))?
            .matmul(&weight.t()?)?
            .reshape(shape)?,
    };
    Ok(product.broadcast_add(&bias)?.to_dtype(dtype)?)
}

fn check(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<()> {
    check_same("linear_bias", &[("x", x), ("weight", weight)])?;
    check_same_or_f32("linear_bias", &[("x", x), ("bias", bias)])?;
    let wanted = match (weight.dims(), x.dims().last()) {
        ([out, depth], Some(last)) if depth == last && bias.dims() == [*out] => {
            let shape = with_last_dim(x.dims(), *out);
            return check_size("linear_bias", &shape, x.dtype(), x.device());
        }
        ([out, depth], _) => {
            format!(
                "x (..., {depth}) and bias ({out},) for the weight {:?}",
                weight.dims()
            )
        }
        _ => "weight (out, in)".into(),
    };
    Err(Error::shape(
        "linear_bias",
        format!(
            "x {:?}, weight {:?}, bias {:?}",
            x.dims(),
            weight.dims(),
            bias.dims()
        ),
    )
    .must_be(wanted, "weights are stored (out, in)"))
}

pub(crate) const INFO: OpInfo = OpInfo::new("linear_bias")
    .on_gpu()
    .planned(LOWERING)
    .costing(
        "2 N in out plus 1 per element of y; backward 4 N in out plus 1 per element of y",
        "x, W, b, y; backward x, W, dy, dx, dW, db",
        |o| o.matmuls(o.output.size(), 2.0, 1.0),
        Some(|o| o.matmuls_backward(o.output.size(), 4.0, 1.0)),
    );
