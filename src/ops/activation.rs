//! Elementwise activations: their lowering, reference and costs.

use super::cast::cast_for;
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Lowering, Slot, kernel, on_gpu};
use super::operand::check_size;
use super::record::{CallSpec, run, wide_input};
use crate::Result;
use crate::kernels::Activation;
use crate::kernels::cpu::activation as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::activation as cuda_kernel;
use candle_core::Tensor;

macro_rules! lowering {
    ($op:literal, $backward:literal, $f:ident) => {
        Lowering {
            forward: |_| {
                let kernel = kernel!($op, |T, _, s| {
                    kernel::forward(Activation::$f, s.x::<T>("x")?, s.y("y")?);
                });
                let kernel = on_gpu!(kernel, |_, l| {
                    cuda_kernel::forward(l.gpu, Activation::$f, l.x("x")?, l.y("y")?)
                });
                Calls::default().call(kernel, [("x", Slot::Input(0))], [("y", Slot::Output)])
            },
            backward: |_| {
                let kernel = kernel!($backward, |T, _, s| {
                    kernel::backward(Activation::$f, s.x::<T>("dy")?, s.x("x")?, s.y("dx")?);
                });
                let kernel = on_gpu!(kernel, |_, l| {
                    let reads = [l.x("dy")?, l.x("x")?];
                    cuda_kernel::backward(l.gpu, Activation::$f, reads, l.y("dx")?)
                });
                let reads = [("dy", Slot::OutputGradient), ("x", Slot::Input(0))];
                Calls::default().call(kernel, reads, [("dx", Slot::Gradient(0))])
            },
        }
    };
}

/// Computes `f(x)` with the kernel or the reference.
pub(super) fn activate(f: Activation, x: &Tensor) -> Result<Tensor> {
    let op = info(f);
    let [x] = &cast_for(op.op, [x])?;
    run(op, CallSpec::like_first(), [x], || reference(f, x))
}

/// Computes `f(x)` in plain candle ops; half precision is computed in f32 and rounded once.
pub(super) fn reference(f: Activation, x: &Tensor) -> Result<Tensor> {
    let name = info(f).op;
    check_size(name, x.dims(), x.dtype(), x.device())?;
    let y = formula(f, &wide_input(name, x)?)?;
    Ok(y.to_dtype(x.dtype())?)
}

/// Computes f(x), elementwise, for x in f32 or f64.
pub(super) fn formula(f: Activation, wide: &Tensor) -> candle_core::Result<Tensor> {
    match f {
        Activation::Tanh => {
            // candle's gradient is 1 - y^2, which has few digits if y is near 1. 2 sigmoid(2 x) has the same gradient
            // without cancellation.
            let sloped = (sigmoid(&(wide * 2.0)?)? * 2.0)?;
            wide.detach().tanh()? + (&sloped - sloped.detach())?
        }
        Activation::Sigmoid => sigmoid(wide),
        Activation::LogSigmoid => {
            // min(x, 0) - log(1 + e) with e = exp(-|x|): the logarithm by its value, with the slope 1 / (1 + e).
            let is_above = wide.gt(0.0)?;
            let ones = wide.ones_like()?;
            let e = (wide * is_above.where_cond(&ones.neg()?, &ones)?)?.exp()?;
            let slope = (e.detach() + 1.0)?.recip()?;
            let sloped = (&e * slope)?;
            let log = (log_1p(&e.detach())? + (&sloped - sloped.detach())?)?;
            is_above.where_cond(&wide.zeros_like()?, wide)? - log
        }
        Activation::Silu => wide * sigmoid(wide)?,
        Activation::Gelu => {
            let erf = (wide * std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
            wide * ((erf + 1.0)? * 0.5)?
        }
        Activation::GeluTanh => {
            let cube = (wide.sqr()? * wide)?;
            let u = ((wide + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            wide * sigmoid(&(u * 2.0)?)?
        }
    }
}

/// Computes log(1 + e) for e from 0 to 1. The rounding error of 1 + e cancels in the quotient.
fn log_1p(e: &Tensor) -> candle_core::Result<Tensor> {
    let sum = (e + 1.0)?;
    let rounded = (&sum - 1.0)?;
    let is_lost = rounded.eq(0.0)?;
    let rounded = is_lost.where_cond(&rounded.ones_like()?, &rounded)?;
    is_lost.where_cond(e, &(sum.log()? * (e / rounded)?)?)
}

/// Computes `1 / (1 + exp(-x))` from `e = exp(-|x|)`, which is at most 1: 1 / (1 + e), or e / (1 + e) for negative x.
/// candle's `silu` is not used: its backward, `s (1 - y) + y` with s = sigmoid(x) and y = x s, cancels for large x and
/// overflows.
fn sigmoid(x: &Tensor) -> candle_core::Result<Tensor> {
    let e = x.abs()?.neg()?.exp()?;
    x.ge(0.0)?.where_cond(&e.ones_like()?, &e)? / (e + 1.0)?
}

const TANH: OpInfo = per_element!(
    OpInfo::new("tanh")
        .planned_composed(lowering!("tanh", "tanh_backward", Tanh))
        .on_gpu(),
    6,
    8,
    BYTES
);

const SIGMOID: OpInfo = per_element!(
    OpInfo::new("sigmoid")
        .planned_composed(lowering!("sigmoid", "sigmoid_backward", Sigmoid))
        .on_gpu(),
    4,
    6,
    BYTES
);

const LOG_SIGMOID: OpInfo = per_element!(
    OpInfo::new("log_sigmoid")
        .planned_composed(lowering!("log_sigmoid", "log_sigmoid_backward", LogSigmoid))
        .on_gpu(),
    6,
    5,
    BYTES
);

const SILU: OpInfo = per_element!(
    OpInfo::new("silu")
        .planned_composed(lowering!("silu", "silu_backward", Silu))
        .on_gpu(),
    5,
    8,
    BYTES
);

const GELU: OpInfo = per_element!(
    OpInfo::new("gelu")
        .planned_composed(lowering!("gelu", "gelu_backward", Gelu))
        .on_gpu(),
    5,
    9,
    BYTES
);

const GELU_TANH: OpInfo = per_element!(
    OpInfo::new("gelu_tanh")
        .planned_composed(lowering!("gelu_tanh", "gelu_tanh_backward", GeluTanh))
        .on_gpu(),
    9,
    14,
    BYTES
);

pub(super) const INFOS: &[OpInfo] = &[TANH, SIGMOID, LOG_SIGMOID, SILU, GELU, GELU_TANH];
const BYTES: &str = "x, y; backward x, dy, dx";

fn info(f: Activation) -> &'static OpInfo {
    match f {
        Activation::Tanh => &TANH,
        Activation::Sigmoid => &SIGMOID,
        Activation::LogSigmoid => &LOG_SIGMOID,
        Activation::Silu => &SILU,
        Activation::Gelu => &GELU,
        Activation::GeluTanh => &GELU_TANH,
    }
}
