//! Root mean square normalisation.
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
use super::norm;
use super::operand::zeros_of;
use super::record::{Spec, like_first, run, wide_input};
use crate::graph::{Attribute, Target};
use crate::kernels::{Norm, limits};
use crate::precision::decide;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{D, DType, Shape, Tensor};

/// `y = w * x / sqrt(mean(x^2) + eps)` along the last dimension: x and y (..., D), w (D).
///
/// Computed in at least f32 (f64 stays f64), rounded once to x's dtype. Beside x in half precision the weight may be in
/// f32; gradients have their operand's dtype. With h = x * rstd and g = dy * w, backward is
/// `dx = rstd (g - h mean(g h))`, `dw = sum over rows of dy h`. Kept for backward: x, w and rstd (one value a row); y
/// would not do, since w may be 0.
///
/// Autocast: y has x's dtype under both policies, whatever w's; a half-precision x beside an f32 w is computed in f32
/// and rounded once. PyTorch 2.15 lists rms_norm with the f32 ops of CUDA's policy, which makes y f32 (for that, move
/// it: `Autocast::cuda(dtype).with("rms_norm", OpClass::F32)`); 2.11 was seen to leave it in x's dtype there, and under
/// the CPU's policy both do. In a pre-norm transformer it makes no difference: the residual stream is f32.
///
/// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
///
/// # Errors
/// A weight that is not (D), mixed dtypes (but for a weight in f32 beside half precision) or devices.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = decide("rms_norm", &[x.into()]).unwrap_or(x.dtype()); // y's; x and weights may meet in a wider one
    let [x, weight] = &cast_for("rms_norm", [x, weight])?;
    check(x, weight)?;
    let y = run(&INFO, RmsNorm { eps }, [x, weight], || {
        reference(x, weight, eps)
    })?;
    cast(&y, dtype)
}

/// [`rms_norm()`] in plain candle ops.
///
/// # Errors
/// As [`rms_norm()`].
pub fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(x, weight)?;
    let (wide, weight) = (wide_input("rms_norm", x)?, wide_input("rms_norm", weight)?);
    if x.dims().contains(&0) {
        // candle divides by zero on a GPU
        return Ok(zeros_of(
            "rms_norm",
            x.shape(),
            x.dtype(),
            &[&wide, &weight],
        )?);
    }
    let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
    let rstd = (mean_square + eps)?.sqrt()?.recip()?;
    let y = wide.broadcast_mul(&rstd)?.broadcast_mul(&weight)?;
    Ok(y.to_dtype(x.dtype())?)
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    check_same_or_f32("rms_norm", &[("x", x), ("weight", weight)])?;
    let width = last_dim("rms_norm", x)?;
    if weight.dims() == [width] && width > 0 {
        return Ok(());
    }
    Err(Error::Shape {
        op: "rms_norm",
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
    "x, W, y; backward x, W, dy, dx, dW"
);

/// Forward keeps rstd.
const LOWERING: Lowering = Lowering {
    forward: |signature| norm::forward(Norm::Rms, signature),
    backward: |signature| norm::backward(Norm::Rms, signature),
};

struct RmsNorm {
    eps: f64,
}

impl Spec for RmsNorm {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        like_first(inputs)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        vec![("eps", Attribute::Number(self.eps))]
    }

    /// 1 / sqrt(mean(x^2) + eps) of each row.
    fn kept(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let x = &inputs[0];
        vec![("rstd", x.rows().into(), x.wide_dtype())]
    }
}
