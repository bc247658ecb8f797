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

use super::cpu::for_stored;
use super::dispatch::{check_same, check_same_or_f32};
use super::info::OpInfo;
use super::linear::{LOWERING, Linear, rows_of, with_last_dim};
use super::lowering::{Calls, Kernel, Signature, Slot, converted, kernel, on_gpu};
use super::operand::{check_size, operand, zeros_of};
use super::record::{run, wide_input};
use super::weight::with_copies;
use crate::graph::{Room, Target};
use crate::kernels::cpu::parallel::block_sums;
use crate::kernels::cpu::{Stored, rows::bias as kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::bias as cuda_kernel;
use crate::kernels::workspace;
use crate::{Error, Result};
use candle_core::{DType, Tensor, WithDType};

/// A linear map with a bias: `y = x W^T + b`, with x (..., in), W (out, in), b (out), y (..., out).
///
/// Backward: `dx = dy W`, `dW = dy^T x`, `db` the sum of dy's rows, in f32 at least, rounded once. Kept for backward: x
/// and W. The product is added to the bias where it lies, so that half precision is rounded once.
///
/// Autocast: lower under both policies, as [`linear`](super::linear()). The bias may be in f32 beside an x in half
/// precision, and stays so in a region: it is rounded to x's dtype on the way, as PyTorch rounds it, and its gradient
/// is not.
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
/// A weight that is not a matrix, a last dimension that is not the weight's `in`, a bias that is not (out), mixed
/// dtypes (but for f32 biases beside half precision) or devices.
pub fn linear_bias(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (x, [weight], copies) = with_copies(&INFO, x, [weight])?;
    let bias = operand("linear_bias", bias)?;
    check(&x, &copies[0].of(&weight), &bias)?;
    run(&INFO, Linear { copies }, [&x, &weight, &bias], || {
        reference(&x, &weight, &bias)
    })
}

/// [`linear_bias()`] in candle's own ops: half precision is widened, and the sum rounded once.
///
/// # Errors
/// As [`linear_bias()`].
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
    Err(Error::Shape {
        op: "linear_bias",
        expected: wanted,
        got: format!(
            "x {:?}, weight {:?}, bias {:?}",
            x.dims(),
            weight.dims(),
            bias.dims()
        ),
        hint: "weights are stored (out, in)".into(),
    })
}

pub(super) const INFO: OpInfo = OpInfo::new("linear_bias")
    .on_gpu()
    .planned(LOWERING)
    .costing(
        "2 N in out, 1 an element of y besides; backward 4 and 1",
        "x, W, b, y; backward x, W, dy, dx, dW, db",
        |o| o.products(o.output.size(), 2.0, 1.0),
        Some(|o| o.products_backward(o.output.size(), 4.0, 1.0)),
    );

/// Reads a bias (out), in y's dtype or in f32; writes it to every row of y (N, out).
pub(crate) fn bias() -> Kernel {
    let kernel = Kernel::new("bias", |_, s| {
        for_stored!(s.dtype_of("y")?, T => {
            let bias = s.wide_x::<<T as Stored>::Wide>("bias")?;
            let mut stored = vec![<T as WithDType>::from_f64(0.0); bias.len()]; // (out): small
            <T as Stored>::store(&bias, &mut stored);
            kernel::fill(&stored, s.y::<T>("y")?);
            Ok(())
        })
    });
    on_gpu!(kernel, |_, l| cuda_kernel::fill(
        l.gpu,
        l.x("bias")?,
        l.y("y")?
    ))
}

/// Reads dy (N, out); writes dbias (out), the sum of its rows in the dtype that sums are computed in, and on a GPU
/// partials.
pub(crate) fn bias_gradient() -> Kernel {
    let kernel = kernel!("bias_backward", |T, _, s| {
        kernel::gradient::<T>(s.x("dy")?, s.y("dbias")?);
    });
    on_gpu!(kernel, |_, l| cuda_kernel::gradient(
        l.gpu,
        l.x("dy")?,
        l.y("dbias")?,
        l.y("partials")?
    ))
}

/// The gradient of the bias, in its dtype.
pub(super) fn push_bias_gradient(signature: &Signature<'_>, calls: &mut Calls) {
    let (bias, wide) = (&signature.inputs[2], signature.output.wide_dtype());
    let sum = match bias.dtype == wide {
        true => Slot::Gradient(2),
        false => calls.scratch(bias.dims, wide),
    };
    let mut writes = vec![("dbias", sum)];
    if signature.target == Target::Cuda {
        let partials = workspace::bias_backward(signature.output.rows(), bias.dims[0]);
        writes.push(("partials", calls.scratch(&[partials], DType::F32)));
    }
    let kernel = bias_gradient().taking(Room {
        what: "partial sums of a bias",
        formula: "BTD / 32",
        elements: block_sums(signature.output.rows(), bias.dims[0]),
        element_bytes: wide.size_in_bytes(),
    });
    calls.push(kernel, [("dy", Slot::OutputGradient)], writes);
    if bias.dtype != wide {
        calls.push(converted(), [("x", sum)], [("y", Slot::Gradient(2))]);
    }
}
