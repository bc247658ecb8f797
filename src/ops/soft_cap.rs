//! Soft capping of logits and of attention scores.

use super::activation;
use super::cast::cast_for;
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Kernel, Lowering, Slot, kernel, on_gpu};
use super::operand::check_size;
use super::record::{CallSpec, run, wide_input};
use crate::graph::Attribute;
use crate::kernels::Activation;
use crate::kernels::cpu::soft_cap as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::activation as cuda_kernel;
use crate::{Error, Result};
use candle_core::Tensor;

/// Computes `y = cap tanh(x / cap)`, elementwise: close to x where |x| is much smaller than `cap`, and never above
/// `cap` in magnitude.
///
/// Backward: `dx = dy (1 - tanh(x / cap)^2)`. Saved for backward: x. Autocast: follows x.
///
/// Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, section 2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let logits = Tensor::new(&[0.1f32, 30.0, 1e6], &Device::Cpu)?;
/// let y = ops::soft_cap(&logits, 30.0)?.to_vec1::<f32>()?;
/// assert!((y[0] - 0.1).abs() < 1e-6 && (y[1] - 30.0 * 1f32.tanh()).abs() < 1e-5);
/// assert_eq!(y[2], 30.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A cap that is not positive and finite; a dtype that is not a float.
pub fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    check_cap("ops::soft_cap", "cap", cap)?;
    soft_cap_of_scaled(x, 1.0, cap)
}

pub(crate) fn soft_cap_of_scaled(x: &Tensor, scale: f64, cap: f64) -> Result<Tensor> {
    let [x] = &cast_for("soft_cap", [x])?;
    let call = CallSpec::like_first()
        .with("scale", Attribute::Number(scale))
        .with("cap", Attribute::Number(cap));
    run(&INFO, call, [x], || composed(x, scale, cap))
}

fn composed(x: &Tensor, scale: f64, cap: f64) -> Result<Tensor> {
    let scaled = (wide_input("soft_cap", x)? * (scale / cap))?;
    let y = (activation::formula(Activation::Tanh, &scaled)? * cap)?;
    Ok(y.to_dtype(x.dtype())?)
}

/// Computes [`soft_cap()`] in plain candle ops.
///
/// # Errors
/// Those of [`soft_cap()`].
pub fn reference(x: &Tensor, cap: f64) -> Result<Tensor> {
    check_cap("ops::soft_cap", "cap", cap)?;
    check_size("soft_cap", x.dims(), x.dtype(), x.device())?;
    composed(x, 1.0, cap)
}

/// Checks that a soft cap is positive and finite, in f32 too.
pub(crate) fn check_cap(config: &'static str, field: &'static str, cap: f64) -> Result<()> {
    match (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&cap) {
        true => Ok(()),
        false => Err(Error::config(config, field, cap).must_be(
            "positive and finite in f32",
            "Gemma 2 has 50 for scores and 30 for logits; without a cap nothing is bounded",
        )),
    }
}

pub(super) const INFO: OpInfo = per_element!(
    OpInfo::new("soft_cap").on_gpu().planned_composed(LOWERING),
    8,
    10,
    "x, y; backward x, dy, dx"
);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("soft_cap", |T, k, s| {
            let [scale, cap] = scale_and_cap(k)?;
            kernel::forward(scale, cap, s.x::<T>("x")?, s.y("y")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            cuda_kernel::soft_cap(l.gpu, scale_and_cap(k)?, l.x("x")?, l.y("y")?)
        });
        let kernel = kernel.with_all(signature.attributes);
        Calls::default().call(kernel, [("x", Slot::Input(0))], [("y", Slot::Output)])
    },
    backward: |signature| {
        let kernel = kernel!("soft_cap_backward", |T, k, s| {
            let [scale, cap] = scale_and_cap(k)?;
            kernel::backward(scale, cap, s.x::<T>("dy")?, s.x("x")?, s.y("dx")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let reads = [l.x("dy")?, l.x("x")?];
            cuda_kernel::soft_cap_backward(l.gpu, scale_and_cap(k)?, reads, l.y("dx")?)
        });
        let kernel = kernel.with_all(signature.attributes);
        let reads = [("dy", Slot::OutputGradient), ("x", Slot::Input(0))];
        Calls::default().call(kernel, reads, [("dx", Slot::Gradient(0))])
    },
};

fn scale_and_cap(k: &Kernel) -> candle_core::Result<[f64; 2]> {
    Ok([k.number("scale")?, k.number("cap")?])
}
