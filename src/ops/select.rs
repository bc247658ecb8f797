//! Selection of elements by a mask.

use super::arithmetic::{broadcast_shape, result_dtype};
use super::cast::{cast, cast_for, operand};
use super::dispatch::{Path, check_one_device, choose};
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Slot, kernel, on_gpu};
use super::operand::{check_size, check_supported, inside_storage};
use super::record::{CallSpec, by_kernels, composed_as, contiguous, input};
use crate::graph::Attribute;
use crate::kernels::cpu::select as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::select as cuda_kernel;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor, WithDType};

/// Selects `y = a` where the condition is not 0, else `y = b`, elementwise, with broadcasting. PyTorch's `where`.
///
/// The condition is u8, as comparisons such as [`gt`](super::gt) return it; the dtypes of a and b are promoted as by
/// [`add`](super::add). An element that is not selected has no effect, not even NaN, and its gradient is 0. Backward:
/// `da = dy` where the condition is not 0, `db = dy` elsewhere, summed over broadcast dimensions. Saved for backward:
/// the condition. Autocast: follows a and b.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[-1f32, 4.0], &Device::Cpu)?;
/// let is_positive = ops::gt(&x, &Tensor::new(0f32, &Device::Cpu)?)?;
/// let y = ops::where_cond(&is_positive, &ops::affine(&x, 2.0, 0.0)?, &x)?;
/// assert_eq!(y.to_vec1::<f32>()?, [-1.0, 8.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A condition that is not u8; shapes that do not broadcast to each other, different devices, or two integers.
pub fn where_cond(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let op = WHERE_INFO.op;
    let dtype = result_dtype(op, a, b)?;
    let shape = broadcast_shape(op, a.shape(), b.shape())?;
    let shape = &broadcast_shape(op, condition.shape(), &shape)?;
    check_one_device(op, ("a", a), ("b", b))?;
    let condition = &mask(op, condition, shape, a)?;
    let [a, b] = [a, b].map(|x| broadcast(op, &cast(&inside_storage(op, x)?, dtype)?, shape));
    let (a, b) = (&a?, &b?);
    let call = CallSpec::new(shape, dtype).reading(condition);
    match choose(&WHERE_INFO, a)? {
        Path::Kernel => by_kernels(&WHERE_INFO, call, [a, b]),
        Path::Reference => composed_as(&WHERE_INFO, &[a, b], call, || {
            let [a, b] = [input(a), input(b)];
            Ok(condition.where_cond(&a.contiguous()?, &b.contiguous()?)?)
        }),
    }
}

/// Replaces elements by `value` where the mask is not 0; other elements are those of x. The mask is u8 and broadcasts
/// with x, as PyTorch's `masked_fill` does.
///
/// An element that is replaced has no effect, not even NaN. Backward: `dx = 0` where the mask is not 0, `dx = dy`
/// elsewhere. Saved for backward: the mask. Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::Mask;
/// use tallow::ops;
///
/// let scores = Tensor::new(&[[1f32, 2.0, 1.0]], &Device::Cpu)?; // (Tq, Tk)
/// let is_padding = Tensor::new(&[0u8, 1, 0], &Device::Cpu)?; // (Tk)
/// let scores = ops::masked_fill(&scores, &is_padding, f64::NEG_INFINITY)?;
/// assert_eq!(ops::softmax(&scores, 1.0, Mask::Full)?.to_vec2::<f32>()?, [[0.5, 0.0, 0.5]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a mask that is not u8; shapes that do not broadcast to each other; different devices; a
/// finite value that x's dtype cannot hold.
pub fn masked_fill(x: &Tensor, mask: &Tensor, value: f64) -> Result<Tensor> {
    let op = FILL_INFO.op;
    check_supported(op, x)?;
    let [x] = &cast_for(op, [x])?;
    let largest = match x.dtype() {
        DType::F16 => half::f16::MAX.to_f64(),
        DType::BF16 => half::bf16::MAX.to_f64(),
        DType::F32 => f32::MAX.into(),
        _ => f64::MAX,
    };
    if value.is_finite() && value.abs() > largest {
        let name = x.dtype().as_str();
        return Err(Error::config(op, "value", value).must_be(
            format!("a number that {name} holds, up to {largest}"),
            "f64::NEG_INFINITY hides a score; a tensor in f32 holds larger numbers",
        ));
    }
    let shape = &broadcast_shape(op, x.shape(), mask.shape())?;
    let mask = &self::mask(op, mask, shape, x)?;
    let x = &broadcast(op, x, shape)?;
    let call = CallSpec::new(shape, x.dtype()).with("value", Attribute::Number(value));
    let call = call.reading(mask);
    match choose(&FILL_INFO, x)? {
        Path::Kernel => by_kernels(&FILL_INFO, call, [x]),
        Path::Reference => composed_as(&FILL_INFO, &[x], call, || {
            let filled = Tensor::full(value, x.shape(), x.device())?.to_dtype(x.dtype())?;
            Ok(mask.where_cond(&filled, &input(x).contiguous()?)?)
        }),
    }
}

/// Returns a mask in this shape, contiguous.
fn mask(op: &'static str, mask: &Tensor, shape: &Shape, x: &Tensor) -> Result<Tensor> {
    if mask.dtype() != DType::U8 {
        return Err(Error::dtype(op, mask.dtype().as_str()).must_be(
            "a mask in u8",
            "ops::eq, ops::ne, ops::lt, ops::le, ops::gt and ops::ge return masks",
        ));
    }
    check_one_device(op, ("x", x), ("the mask", mask))?;
    check_size(op, shape.dims(), x.dtype(), x.device())?;
    let mask = inside_storage(op, mask)?;
    Ok(contiguous(&mask.broadcast_as(shape)?)?)
}

fn broadcast(op: &'static str, x: &Tensor, shape: &Shape) -> Result<Tensor> {
    match x.shape() == shape {
        true => operand(op, x),
        false => operand(op, &x.broadcast_as(shape)?),
    }
}

const WHERE_INFO: OpInfo = OpInfo::new("where_cond")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(WHERE)
    .moving();

const FILL_INFO: OpInfo = OpInfo::new("masked_fill")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(FILL)
    .moving();

pub(super) const INFOS: &[OpInfo] = &[WHERE_INFO, FILL_INFO];

const CONDITION: (&str, Slot) = ("condition", Slot::ExtraInput(0));

const WHERE: Lowering = Lowering {
    forward: |_| {
        let reads = [CONDITION, ("a", Slot::Input(0)), ("b", Slot::Input(1))];
        Calls::default().call(select(0.0), reads, [("y", Slot::Output)])
    },
    backward: |_| {
        let part = |calls: Calls, name, input| {
            let reads = [CONDITION, (name, Slot::OutputGradient)];
            calls.call(select(0.0), reads, [("y", Slot::Gradient(input))])
        };
        part(part(Calls::default(), "a", 0), "b", 1)
    },
};

const FILL: Lowering = Lowering {
    forward: |signature| {
        let value = match signature.attribute("value") {
            Some(Attribute::Number(value)) => value,
            _ => 0.0,
        };
        let reads = [CONDITION, ("b", Slot::Input(0))];
        Calls::default().call(select(value), reads, [("y", Slot::Output)])
    },
    backward: |_| {
        let reads = [CONDITION, ("b", Slot::OutputGradient)];
        Calls::default().call(select(0.0), reads, [("y", Slot::Gradient(0))])
    },
};

/// Reads a condition, and a or b or both; writes y, with `value` in place of the one that is missing.
fn select(value: f64) -> Kernel {
    let kernel = kernel!("select", of "y", |T, k, s| {
        let operands = [s.some_x::<T>("a")?, s.some_x("b")?];
        let value = WithDType::from_f64(k.number("value")?);
        kernel::select(s.x("condition")?, operands, value, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (operands, value) = ([l.some_x("a"), l.some_x("b")], k.number("value")?);
        cuda_kernel::select(l.gpu, l.x("condition")?, operands, value, l.y("y")?)
    });
    kernel.with("value", Attribute::Number(value))
}
