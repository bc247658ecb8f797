//! Linear maps without bias, y = x W^T.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?; // (..., in)
//! let weight = Tensor::ones((5, 4), DType::F32, &Device::Cpu)?; // (out, in)
//! let y = ops::linear(&x, &weight)?;
//! assert_eq!(y.dims(), [2, 3, 5]);
//! assert_eq!(y.max_all()?.to_scalar::<f32>()?, 4.0);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::bias::{bias, push_bias_gradient};
use super::dispatch::check_same;
use super::info::OpInfo;
use super::lowering::{Accumulate, Calls, Lowering, Signature, Slot};
use super::matmul_kernel::{Factor, matmul};
use super::operand::{check_size, zeros_of};
use super::record::{Spec, float_input, run};
use super::weight::{self, WeightCopy, read_weight, with_copies};
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{D, DType, Shape, Tensor};

/// Computes a linear map without bias: `y = x W^T`, with x (..., in), W (out, in), y (..., out).
///
/// Backward: `dx = dy W`, `dW = dy^T x`. Saved for backward: x and W. 2 * rows * in * out FLOPs forward, twice that
/// backward. The weight is used transposed by its strides, without a copy. Half precision is summed in f32 and rounded
/// once. On the CPU it is widened for the matmul, except for bf16 if
/// [`bf16_matmul_unit`](crate::hardware::bf16_matmul_unit) reports a unit. Autocast: lower under both policies; unlike
/// PyTorch's, the gradient of an f32 weight is not rounded to half precision.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[[1f32, 0.0], [0.0, 1.0], [1.0, 1.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::linear(&x, &w)?.to_vec2::<f32>()?, [[1.0, 2.0, 3.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight that is not a matrix; a last dimension that is not the weight's `in`; mixed dtypes or devices.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (x, [weight], copies) = with_copies(&INFO, x, [weight])?;
    check(&x, &copies[0].of(&weight))?;
    run(&INFO, Linear { copies }, [&x, &weight], || {
        reference(&x, &weight)
    })
}

/// Computes [`linear()`] in candle's own ops: flatten, `matmul` with the transposed weight, restore the shape.
///
/// # Errors
/// Those of [`linear()`].
pub fn reference(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check(x, weight)?;
    let (x, weight) = (float_input(LINEAR, x)?, float_input(LINEAR, weight)?);
    let (out, depth) = weight.dims2()?;
    let shape = with_last_dim(x.dims(), out);
    if depth == 0 {
        return Ok(zeros_of(LINEAR, shape, x.dtype(), &[&x, &weight])?);
    }
    Ok(x.reshape((rows_of(&shape), depth))?
        .matmul(&weight.t()?)?
        .reshape(shape)?)
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    check_same(LINEAR, &[("x", x), ("weight", weight)])?;
    let wanted = match (weight.dims(), x.dims().last()) {
        ([out, depth], Some(last)) if depth == last => {
            return check_size(
                LINEAR,
                &with_last_dim(x.dims(), *out),
                x.dtype(),
                x.device(),
            );
        }
        ([_, depth], _) => format!("x (..., {depth}) for the weight {:?}", weight.dims()),
        _ => "weight (out, in)".into(),
    };
    Err(Error::shape(
        LINEAR,
        format!("x {:?}, weight {:?}", x.dims(), weight.dims()),
    )
    .must_be(wanted, "weights are stored (out, in)"))
}

pub(crate) const LINEAR: &str = "linear";

pub(crate) const INFO: OpInfo = OpInfo::new(LINEAR).on_gpu().planned(LOWERING).costing(
    "2 N in out, backward 4",
    "x, W, y; backward x, W, dy, dx, dW",
    |o| o.matmuls(o.output.size(), 2.0, 0.0),
    Some(|o| o.matmuls_backward(o.output.size(), 4.0, 0.0)),
);

/// The lowering of a linear layer, with or without a bias.
pub(super) const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let (x, weight) = factors(signature);
        let (mut calls, mut accumulate) = (Calls::default(), Accumulate::Never);
        if signature.inputs.len() > 2 {
            calls.push(bias(), [("bias", Slot::Input(2))], [("y", Slot::Output)]);
            accumulate = Accumulate::Always;
        }
        if x.cols > 0 || accumulate == Accumulate::Never {
            let kernel = matmul(x, weight.t(), accumulate);
            let factors = [("a", Slot::Input(0)), ("b", read_weight(signature, 1))];
            calls.push(kernel, factors, [("c", Slot::Output)]);
        }
        calls
    },
    backward: |signature| {
        let mut calls = Calls::default();
        if signature.inputs.len() > 2 {
            push_bias_gradient(signature, &mut calls);
        }
        let (x, weight) = factors(signature);
        let (dy, of_dy) = (Slot::OutputGradient, Factor::new(x.rows, weight.rows)); // (N, out)
        let dx = matmul(of_dy, weight, Accumulate::Never);
        let read = read_weight(signature, 1);
        calls.push(dx, [("a", dy), ("b", read)], [("c", Slot::Gradient(0))]);
        let dw = matmul(of_dy.t(), x, Accumulate::Never);
        let factors = [("a", dy), ("b", Slot::Input(0))];
        calls.call(dw, factors, [("c", Slot::Gradient(1))])
    },
};

/// Returns x (N, in) and the weight (out, in) as factors.
pub(super) fn factors(signature: &Signature<'_>) -> (Factor, Factor) {
    let (x, weight) = (&signature.inputs[0], signature.inputs[1].dims);
    (
        Factor::new(x.rows(), weight[1]),
        Factor::new(weight[0], weight[1]),
    )
}

/// A matmul of x and a weight; a third input is its bias.
pub(super) struct Linear {
    pub copies: [WeightCopy; 1],
}

impl Spec for Linear {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let [x, weight] = [&inputs[0], &inputs[1]];
        (with_last_dim(x.dims, weight.dims[0]).into(), x.dtype)
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        weight::tensors(&self.copies)
    }

    fn extra_inputs_for_backward(&self, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
        weight::tensors_for_backward(&self.copies, &inputs[1..2])
    }

    fn free_after_forward(&self) {
        self.copies[0].free_after_forward();
    }
}

/// Returns N, the number of rows of a tensor of these dimensions, also of an empty one.
pub(crate) fn rows_of(dims: &[usize]) -> usize {
    dims.split_last()
        .map_or(1, |(_, leading)| leading.iter().product())
}

/// Returns `dims` with another last dimension.
pub(crate) fn with_last_dim(dims: &[usize], last: usize) -> Vec<usize> {
    let leading = dims.len() - 1;
    [&dims[..leading], &[last]].concat()
}

pub(super) fn last_dim(op: &'static str, x: &Tensor) -> Result<usize> {
    check_size(op, x.dims(), x.dtype(), x.device())?;
    x.dim(D::Minus1).map_err(|_| {
        Error::shape(op, "a scalar").must_be("at least one dimension", "reshape it to one row")
    })
}
