//! Exponentials, logarithms and powers, which CUDA's autocast policy computes in f32.

use super::arithmetic::lowering::{div, mul};
use super::cast::{cast, cast_for};
use super::dispatch::{Path, choose};
use super::info::{OpInfo, per_element};
use super::lowering::{
    Calls, Lowering, Slot, kernel, map_backward as backward, map_forward as forward,
};
use super::operand::check_supported;
use super::record::{CallSpec, by_kernels, composed_as, input};
use crate::Result;
use crate::graph::Attribute;
use crate::kernels::cpu::arithmetic as kernel;
use candle_core::{DType, Shape, Tensor};

/// Computes `y = exp(x)`, elementwise.
///
/// The following also holds for [`log()`], [`pow()`] and [`rsqrt()`]. Half precision is computed in f32 and rounded
/// once, forward and backward, unless an autocast policy demands an f32 output, as CUDA's does. Saved for backward: y
/// for `exp`, x for the others.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[f32::NEG_INFINITY, 0.0, 1.0], &Device::Cpu)?;
/// let y = tallow::ops::exp(&x)?.to_vec1::<f32>()?;
/// assert_eq!(y[..2], [0.0, 1.0]);
/// assert!((y[2] - std::f32::consts::E).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn exp(x: &Tensor) -> Result<Tensor> {
    in_f32(&EXP_INFO, x, x.shape(), Tensor::exp)
}

/// Computes `y = ln(x)`, elementwise; otherwise like [`exp`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[0f32, 1.0, 10.0], &Device::Cpu)?;
/// let y = tallow::ops::log(&x)?.to_vec1::<f32>()?;
/// assert_eq!(y[..2], [f32::NEG_INFINITY, 0.0]);
/// assert!((y[2] - std::f32::consts::LN_10).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn log(x: &Tensor) -> Result<Tensor> {
    in_f32(&LOG_INFO, x, x.shape(), Tensor::log)
}

/// Computes `y = x^exponent`, elementwise; otherwise like [`exp`].
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[1f32, -2.0, 3.0], &Device::Cpu)?;
/// let y = ops::pow(&x, 2.0)?;
/// assert_eq!(y.to_vec1::<f32>()?, [1.0, 4.0, 9.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [2.0, -4.0, 6.0]); // 2 x
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn pow(x: &Tensor, exponent: f64) -> Result<Tensor> {
    let attributes = vec![("exponent", Attribute::Number(exponent))];
    with_attributes(&POW_INFO, x, x.shape(), attributes, |x| x.powf(exponent))
}

/// Computes `y = 1 / sqrt(x)`, elementwise; otherwise like [`exp`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[0.25f32, 1.0, 4.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::rsqrt(&x)?.to_vec1::<f32>()?, [2.0, 1.0, 0.5]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn rsqrt(x: &Tensor) -> Result<Tensor> {
    in_f32(&RSQRT_INFO, x, x.shape(), |x| x.sqrt()?.recip())
}

const EXP_INFO: OpInfo = per_element!(map_info("exp", EXP), 1, 2, MAP_BYTES);
const LOG_INFO: OpInfo = per_element!(map_info("log", LOG), 1, 2, MAP_BYTES);
const POW_INFO: OpInfo = per_element!(map_info("pow", POW), 1, 2, MAP_BYTES);
const RSQRT_INFO: OpInfo = per_element!(map_info("rsqrt", RSQRT), 2, 3, MAP_BYTES);

const MAP_BYTES: &str = "x, y; backward x or y, dy, dx";

const fn map_info(op: &'static str, lowering: Lowering) -> OpInfo {
    OpInfo::new(op)
        .on_gpu_up_to(usize::MAX)
        .planned_composed(lowering)
}

pub(super) const INFOS: &[OpInfo] = &[EXP_INFO, LOG_INFO, POW_INFO, RSQRT_INFO];

const EXP: Lowering = Lowering {
    forward: |_| {
        forward(kernel!("exp", |T, _, s| kernel::exp(
            s.x::<T>("x")?,
            s.y("y")?
        )))
    },
    backward: |_| {
        let reads = [("a", Slot::OutputGradient), ("b", Slot::Output)];
        Calls::default().call(mul(), reads, [("y", Slot::Gradient(0))])
    },
};

const LOG: Lowering = Lowering {
    forward: |_| {
        forward(kernel!("log", |T, _, s| kernel::log(
            s.x::<T>("x")?,
            s.y("y")?
        )))
    },
    backward: |_| {
        let reads = [("a", Slot::OutputGradient), ("b", Slot::Input(0))];
        Calls::default().call(div(), reads, [("y", Slot::Gradient(0))])
    },
};

const POW: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("pow", |T, k, s| {
            kernel::pow(s.x::<T>("x")?, k.number("exponent")?, s.y("y")?)
        });
        forward(kernel.with_all(signature.attributes))
    },
    backward: |signature| {
        let kernel = kernel!("pow_backward", |T, k, s| {
            kernel::pow_backward(
                s.x::<T>("dy")?,
                s.x("x")?,
                k.number("exponent")?,
                s.y("dx")?,
            )
        });
        let kernel = kernel.with_all(signature.attributes);
        backward(kernel, ("x", Slot::Input(0)))
    },
};

const RSQRT: Lowering = Lowering {
    forward: |_| {
        forward(kernel!("rsqrt", |T, _, s| kernel::rsqrt(
            s.x::<T>("x")?,
            s.y("y")?
        )))
    },
    backward: |_| {
        let kernel = kernel!("rsqrt_backward", |T, _, s| {
            kernel::rsqrt_backward(s.x::<T>("dy")?, s.x("x")?, s.y("dx")?)
        });
        backward(kernel, ("x", Slot::Input(0)))
    },
};

/// Computes `f(x)` in at least f32, with an output of this shape and of the policy's dtype.
pub(super) fn in_f32(
    op: &'static OpInfo,
    x: &Tensor,
    shape: impl Into<Shape>,
    f: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    with_attributes(op, x, shape, Vec::new(), f)
}

/// Does the same with attributes, which the lowering needs.
pub(super) fn with_attributes(
    op: &'static OpInfo,
    x: &Tensor,
    shape: impl Into<Shape>,
    attributes: Vec<(&'static str, Attribute)>,
    f: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    check_supported(op.op, x)?;
    let [x] = cast_for(op.op, [x])?;
    let call = CallSpec::new(shape, x.dtype()).with_all(attributes);
    if choose(op, &x)? == Path::Kernel {
        return by_kernels(op, call, [&x]);
    }
    composed_as(op, &[&x], call, || {
        let wide = match x.dtype() {
            DType::F16 | DType::BF16 => cast(&x, DType::F32)?,
            _ => input(&x),
        };
        cast(&f(&wide)?, x.dtype())
    })
}
