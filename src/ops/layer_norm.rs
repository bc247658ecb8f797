//! Layer normalisation.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[[1f32, 2.0, 3.0, 6.0]], &Device::Cpu)?; // (..., D)
//! let weight = Tensor::new(&[1f32; 4], &Device::Cpu)?;
//! let bias = Tensor::new(&[0f32; 4], &Device::Cpu)?;
//! let y = ops::layer_norm(&x, &weight, &bias, 1e-5)?;
//! assert!(y.sum_all()?.to_scalar::<f32>()?.abs() < 1e-5); // mean 0
//! assert!((y.sqr()?.sum_all()?.to_scalar::<f32>()? - 4.0).abs() < 1e-4); // variance 1
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::{cast, cast_for};
use super::dispatch::check_same_or_f32;
use super::info::{OpInfo, per_element};
use super::linear::last_dim;
use super::lowering::Lowering;
use super::norm::{self, NormCall};
use super::operand::zeros_of;
use super::record::{run, wide_input};
use crate::kernels::{Norm, limits};
use crate::precision::decide;
use crate::{Error, Result};
use candle_core::{D, Tensor};

/// Computes `y = w (x - mean(x)) / sqrt(var(x) + eps) + b` along the last dimension: x and y (..., D), w and b (D); the
/// variance is the biased one.
///
/// Half precision is computed in f32, f64 in f64; y is rounded once to x's dtype. If x is in half precision, w and b
/// may be in f32; gradients have their operand's dtype. With h = (x - mean) rstd and g = dy w, backward is
/// `dx = rstd (g - mean(g) - h mean(g h))`, `dw = sum dy h`, `db = sum dy`. Saved for backward: x, w, b, and (mean,
/// rstd) of each row.
///
/// In a row of two elements h is near -1 and 1, and the terms of dx cancel to `eps / (var + eps)` of their size. What
/// remains is mostly rounding error, as in PyTorch.
///
/// Autocast: under CUDA's policy, the computation and y are f32. Under the CPU's, y has x's dtype; a half-precision x
/// with f32 w and b is computed in f32 and rounded once.
///
/// Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 4.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[5f32, 7.0], [-100.0, 100.0]], &Device::Cpu)?; // (..., D)
/// let w = Tensor::new(&[1f32, 2.0], &Device::Cpu)?; // (D)
/// let b = Tensor::new(&[0f32, 10.0], &Device::Cpu)?; // (D)
/// let y = tallow::ops::layer_norm(&x, &w, &b, 1e-5)?.to_vec2::<f32>()?;
/// for row in y {
///     assert!((row[0] + 1.0).abs() < 1e-4 && (row[1] - 12.0).abs() < 1e-4);
/// }
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight or bias that is not (D); mixed devices; mixed dtypes, except for f32 weights with x in half precision.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = decide("layer_norm", &[x.into()]).unwrap_or(x.dtype()); // y's; the others may be cast wider
    let [x, weight, bias] = &cast_for("layer_norm", [x, weight, bias])?;
    check(x, weight, bias)?;
    let call = NormCall {
        norm: Norm::Layer,
        eps,
    };
    let y = run(&INFO, call, [x, weight, bias], || {
        reference(x, weight, bias, eps)
    })?;
    cast(&y, dtype)
}

/// Computes [`layer_norm()`] in plain candle ops.
///
/// # Errors
/// Those of [`layer_norm()`].
pub fn reference(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    check(x, weight, bias)?;
    let [wide, weight, bias] = [x, weight, bias].map(|x| wide_input("layer_norm", x));
    let (wide, weight, bias) = (wide?, weight?, bias?);
    if x.dims().contains(&0) {
        // candle divides by zero on a GPU
        return Ok(zeros_of(
            "layer_norm",
            x.shape(),
            x.dtype(),
            &[&wide, &weight, &bias],
        )?);
    }
    let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let rstd = (variance + eps)?.sqrt()?.recip()?;
    let y = centred.broadcast_mul(&rstd)?.broadcast_mul(&weight)?;
    Ok(y.broadcast_add(&bias)?.to_dtype(x.dtype())?)
}

fn check(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<()> {
    let operands = [("x", x), ("weight", weight), ("bias", bias)];
    check_same_or_f32("layer_norm", &operands)?;
    let width = last_dim("layer_norm", x)?;
    if weight.dims() == [width] && bias.dims() == [width] && width > 0 {
        return Ok(());
    }
    Err(Error::Shape {
        op: "layer_norm",
        expected: format!("weight and bias ({width},) for x {:?}, not empty", x.dims()),
        got: format!("weight {:?}, bias {:?}", weight.dims(), bias.dims()),
        hint: "one of each for each element of the last dimension".into(),
    })
}

pub(crate) const INFO: OpInfo = per_element!(
    OpInfo::new("layer_norm")
        .on_gpu_up_to(limits::NORM_WIDTH)
        .planned(LOWERING),
    7,
    12,
    "x, W, y; backward x, W, dy, dx, dW"
);

const LOWERING: Lowering = Lowering {
    forward: |signature| norm::forward(Norm::Layer, signature),
    backward: |signature| norm::backward(Norm::Layer, signature),
};
