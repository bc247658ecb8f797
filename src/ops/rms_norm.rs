//! RMSNorm, root mean square normalisation.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[[3f32, -4.0]], &Device::Cpu)?; // (..., D)
//! let weight = Tensor::new(&[1f32, 1.0], &Device::Cpu)?; // (D)
//! let y = ops::rms_norm(&x, &weight, 1e-5)?;
//! assert!((y.sqr()?.mean_all()?.to_scalar::<f32>()? - 1.0).abs() < 1e-5);
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

/// Computes `y = w * x / sqrt(mean(x^2) + eps)` along the last dimension: x and y (..., D), w (D).
///
/// Half precision is computed in f32, f64 in f64; y is rounded once to x's dtype. If x is in half precision, the weight
/// may be in f32; gradients have their operand's dtype. With h = x * rstd and g = dy * w, backward is
/// `dx = rstd (g - h mean(g h))`, `dw = sum over rows of dy h`. Saved for backward: x, w and rstd (one value per row).
/// y instead of x would not suffice, because w may be 0.
///
/// Autocast: y has x's dtype under both policies, whatever w's; a half-precision x with an f32 w is computed in f32 and
/// rounded once. PyTorch 2.15 lists rms_norm with the f32 ops of CUDA's policy, which makes y f32; for that, use
/// `Autocast::cuda(dtype).with("rms_norm", OpClass::F32)`. PyTorch 2.11 was observed to return x's dtype there, and
/// under the CPU's policy both versions do. In a pre-norm transformer it makes no difference: the residual stream is
/// f32.
///
/// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[3f32, 4.0, 0.0, 0.0]], &Device::Cpu)?; // (..., D), of mean square 6.25
/// let w = Tensor::new(&[1f32, 1.0, 1.0, 10.0], &Device::Cpu)?; // (D)
/// let y = tallow::ops::rms_norm(&x, &w, 1e-6)?.to_vec2::<f32>()?;
/// assert!((y[0][0] - 1.2).abs() < 1e-5 && (y[0][1] - 1.6).abs() < 1e-5);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight that is not (D); mixed devices; mixed dtypes, except for an f32 weight with x in half precision.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normed(Norm::Rms, x, weight, eps)
}

/// Computes `y = (1 + w) * x / sqrt(mean(x^2) + eps)` along the last dimension: [`rms_norm()`] with weights relative to
/// 1, as in Gemma. `1 + w` is computed in at least f32.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[0.25f32, -0.5], &Device::Cpu)?;
/// let y = ops::offset_rms_norm(&x, &w, 1e-6)?;
/// let same = ops::rms_norm(&x, &(w + 1.0)?, 1e-6)?;
/// assert!((y - same)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`rms_norm()`].
pub fn offset_rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normed(Norm::OffsetRms, x, weight, eps)
}

fn info(norm: Norm) -> &'static OpInfo {
    match norm {
        Norm::OffsetRms => &OFFSET_INFO,
        Norm::Rms | Norm::Layer => &INFO,
    }
}

fn normed(norm: Norm, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let info = info(norm);
    let dtype = decide(info.op, &[x.into()]).unwrap_or(x.dtype()); // y's; the others may be cast wider
    let [x, weight] = &cast_for(info.op, [x, weight])?;
    check(info.op, x, weight)?;
    let call = NormCall { norm, eps };
    let y = run(info, call, [x, weight], || composed(norm, x, weight, eps))?;
    cast(&y, dtype)
}

/// Computes [`rms_norm()`] in plain candle ops.
///
/// # Errors
/// Those of [`rms_norm()`].
pub fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(INFO.op, x, weight)?;
    composed(Norm::Rms, x, weight, eps)
}

/// Computes [`offset_rms_norm()`] in plain candle ops.
///
/// # Errors
/// Those of [`offset_rms_norm()`].
pub fn offset_reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(OFFSET_INFO.op, x, weight)?;
    composed(Norm::OffsetRms, x, weight, eps)
}

fn composed(norm: Norm, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let op = info(norm).op;
    let (wide, mut weight) = (wide_input(op, x)?, wide_input(op, weight)?);
    if norm == Norm::OffsetRms {
        weight = (weight + 1.0)?;
    }
    if x.dims().contains(&0) {
        // candle divides by zero on a GPU
        return Ok(zeros_of(op, x.shape(), x.dtype(), &[&wide, &weight])?);
    }
    let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
    let rstd = (mean_square + eps)?.sqrt()?.recip()?;
    let y = wide.broadcast_mul(&rstd)?.broadcast_mul(&weight)?;
    Ok(y.to_dtype(x.dtype())?)
}

fn check(op: &'static str, x: &Tensor, weight: &Tensor) -> Result<()> {
    check_same_or_f32(op, &[("x", x), ("weight", weight)])?;
    let width = last_dim(op, x)?;
    if weight.dims() == [width] && width > 0 {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        expected: format!("weight ({width},) for x {:?}, not empty", x.dims()),
        got: format!("weight {:?}", weight.dims()),
        hint: "one weight for each element of the last dimension".into(),
    })
}

pub(crate) const INFO: OpInfo = per_element!(
    OpInfo::new("rms_norm")
        .on_gpu_up_to(limits::NORM_WIDTH)
        .planned(LOWERING),
    4,
    9,
    BYTES
);

pub(crate) const OFFSET_INFO: OpInfo = per_element!(
    OpInfo::new("offset_rms_norm")
        .on_gpu_up_to(limits::NORM_WIDTH)
        .planned(OFFSET_LOWERING),
    4,
    9,
    BYTES
);

const BYTES: &str = "x, W, y; backward x, W, dy, dx, dW";

const LOWERING: Lowering = Lowering {
    forward: |signature| norm::forward(Norm::Rms, signature),
    backward: |signature| norm::backward(Norm::Rms, signature),
};

const OFFSET_LOWERING: Lowering = Lowering {
    forward: |signature| norm::forward(Norm::OffsetRms, signature),
    backward: |signature| norm::backward(Norm::OffsetRms, signature),
};
