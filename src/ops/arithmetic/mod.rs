//! Elementwise sums, differences, products and quotients, with broadcasting and dtype promotion.

pub(crate) mod lowering;

use lowering::{ADD, ADD_SCALED, DIV, MUL, SUB};

use super::cast::cast;
use super::cast::operand;
use super::check_same;
use super::cost::{Cost, cost};
use super::dispatch::{Path, choose};
use super::info::{OpInfo, per_element};
use super::operand::{check_size, is_half, sums_in_half, without_repeats};
use super::record::{CallSpec, by_kernels, composed_as, widen};
use crate::graph::Attribute;
use crate::precision::{self, is_castable};
use crate::probe::{Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// Computes `a + b`, elementwise, with broadcasting.
///
/// The following also holds for [`sub`], [`mul`] and [`div`]. Dtypes are promoted as in PyTorch, inside and outside of
/// autocast regions: f16 + f32 is f32, f16 + bf16 is f32, anything + f64 is f64, and an integer takes the float's
/// dtype. A scalar tensor takes the dtype of an operand with dimensions: bf16 * f32 scalar is bf16. If the other
/// operand is an integer tensor, the result has the scalar's dtype. The gradient of an operand has the dtype and shape
/// of that operand. Half precision is computed in f32 and rounded once, and so are the sums of a broadcast operand's
/// gradient. candle's own `+` needs equal dtypes. Saved for backward: nothing for `add` and `sub`; a and b for `mul`
/// and `div`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let a = Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[10f32, 20.0], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let sum = tallow::ops::add(&a, &b)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[11.0, 21.0], [12.0, 22.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not broadcast to each other, different devices, or two integers.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(&ADD_INFO, a, b, Tensor::broadcast_add)
}

/// Computes `a - b`, elementwise; otherwise like [`add`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let a = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[1f32, 0.5], &Device::Cpu)?;
/// assert_eq!(tallow::ops::sub(&a, &b)?.to_vec2::<f32>()?, [[0.0, 1.5], [2.0, 3.5]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`add`].
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(&SUB_INFO, a, b, Tensor::broadcast_sub)
}

/// Computes `a * b`, elementwise; otherwise like [`add`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let a = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let b = Tensor::new(10f32, &Device::Cpu)?; // a scalar
/// assert_eq!(tallow::ops::mul(&a, &b)?.to_vec2::<f32>()?, [[10.0, 20.0], [30.0, 40.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`add`].
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(&MUL_INFO, a, b, Tensor::broadcast_mul)
}

/// Computes `a / b`, elementwise; otherwise like [`add`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let sums = Tensor::new(&[6f32, 9.0], &Device::Cpu)?;
/// let counts = Tensor::new(&[4u32, 2], &Device::Cpu)?; // takes the float's dtype
/// assert_eq!(tallow::ops::div(&sums, &counts)?.to_vec1::<f32>()?, [1.5, 4.5]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`add`].
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(&DIV_INFO, a, b, Tensor::broadcast_div)
}

/// Computes `a + scale * b`, elementwise: a residual sum with a scaled branch, PyTorch's `add` with `alpha`.
///
/// Otherwise like [`add`]; half precision is rounded once. Backward: `da = dy`, `db = scale dy`. Saved for backward:
/// nothing.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// let branch = Tensor::new(&[10f32, 20.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::add_scaled(&x, &branch, 0.5)?.to_vec1::<f32>()?, [6.0, 12.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`add`].
pub fn add_scaled(a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    apply_binary(&ADD_SCALED_INFO, a, b, Some(scale), |a, b| {
        let (a, b) = (widen(a)?, widen(b)?);
        let branch = match scale {
            0.0 => (&b * b.zeros_like()?)?, // candle drops the graph of a product with the number 0
            _ => (b * scale)?,
        };
        a.broadcast_add(&branch)
    })
}

pub(crate) const ADD_INFO: OpInfo = OpInfo::new("add")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(ADD)
    .costing(
        "1 an element, backward 0",
        "a, b, y; backward dy, passed through",
        |o| o.elementwise(1.0),
        Some(|o| cost(0.0, 0.0, o.output.bytes(), 0.0)),
    );

const SUB_INFO: OpInfo = OpInfo::new("sub")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(SUB)
    .costing(
        "1 an element, backward 1",
        "a, b, y; backward dy, db",
        |o| o.elementwise(1.0),
        Some(second_scaled),
    );

const MUL_INFO: OpInfo = per_element!(
    OpInfo::new("mul")
        .on_gpu_up_to(usize::MAX)
        .planned_composed(MUL),
    1,
    2,
    "a, b, y; backward a, b, dy, da, db"
);

const ADD_SCALED_INFO: OpInfo = OpInfo::new("add_scaled")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(ADD_SCALED)
    .costing(
        "2 an element, backward 1",
        "a, b, y; backward dy, db",
        |o| o.elementwise(2.0),
        Some(second_scaled),
    );

const DIV_INFO: OpInfo = per_element!(
    OpInfo::new("div")
        .on_gpu_up_to(usize::MAX)
        .planned_composed(DIV),
    1,
    4,
    "a, b, y; backward a, b, dy, da, db"
);

pub(super) const INFOS: &[OpInfo] = &[ADD_INFO, SUB_INFO, MUL_INFO, ADD_SCALED_INFO, DIV_INFO];

/// The cost of a backward where the first gradient is dy itself, and the second is dy with a factor.
fn second_scaled(o: &Operands<'_>) -> Option<Cost> {
    let bytes = o.output.bytes();
    cost(0.0, o.output.elements(), bytes, bytes)
}

fn binary(
    op: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    apply: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    apply_binary(op, a, b, None, apply)
}

/// Applies an op to a and b, with a `scale` if it has one: by its kernel, else by `apply` on operands of one dtype.
fn apply_binary(
    info: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    scale: Option<f64>,
    apply: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let op = info.op;
    let (a, b) = (unrepeated(op, a)?, unrepeated(op, b)?);
    let dtype = result_dtype(op, &a.view, &b.view)?;
    let shape = broadcast_shape(op, &a.shape, &b.shape)?;
    check_size(op, shape.dims(), dtype, a.view.device())?;
    // The gradient of a broadcast is a sum, for which candle's half precision has too few digits. Its division rounds
    // three times in backward. So both are computed in f32.
    let broadcasts = [&a, &b].iter().any(|x| x.view.shape() != &shape);
    let in_f32 = is_half(dtype) && (broadcasts || op == "div");
    let cast_operand = |x: &Unrepeated| -> Result<Tensor> {
        let wide = match (in_f32, x.view.rank()) {
            (false, _) => cast(&x.view, dtype)?,
            (true, 0) => cast(&x.view, DType::F32)?, // PyTorch does not round a scalar to the others' dtype either
            (true, _) => cast(&cast(&x.view, dtype)?, DType::F32)?,
        };
        match wide.shape() == &x.shape {
            true => Ok(wide),
            false => Ok(wide.broadcast_as(&x.shape)?),
        }
    };
    let (a, b) = (cast_operand(&a)?, cast_operand(&b)?);
    check_same(op, &[("a", &a), ("b", &b)])?;
    let scale = scale.map(|scale| ("scale", Attribute::Number(scale)));
    let call = CallSpec::new(shape, dtype).with_all(scale);
    match choose(info, &a)? {
        Path::Kernel => by_kernels(info, call, [&a, &b]),
        Path::Reference => composed_as(info, &[&a, &b], call, || cast(&apply(&a, &b)?, dtype)),
    }
}

/// An operand, and the shape that it represents.
struct Unrepeated {
    /// The operand. For a broadcast view in half precision, each element occurs once: its gradient is summed here, not
    /// by candle.
    view: Tensor,
    shape: Shape,
}

fn unrepeated(op: &'static str, x: &Tensor) -> Result<Unrepeated> {
    let shape = x.shape().clone();
    check_size(op, x.dims(), x.dtype(), x.device())?;
    let view = match sums_in_half(x) {
        true => without_repeats(x)?,
        false => operand(op, x)?,
    };
    Ok(Unrepeated { view, shape })
}

/// Returns PyTorch's result dtype, after the casts of an autocast policy.
///
/// # Errors
/// Two integers.
pub(super) fn result_dtype(op: &'static str, a: &Tensor, b: &Tensor) -> Result<DType> {
    let mut operands = [Operand::from(a), Operand::from(b)];
    if let Some(target) = precision::decide(op, &operands) {
        for x in operands.iter_mut().filter(|x| is_castable(x.dtype)) {
            x.dtype = target;
        }
    }
    let got = || format!("{} and {}", a.dtype().as_str(), b.dtype().as_str());
    precision::promoted(&operands).ok_or_else(|| {
        Error::dtype(op, got()).must_be(
            "f16, bf16, f32 or f64, in one operand at least",
            "candle's own operators take integers",
        )
    })
}

/// Returns the shape that two shapes broadcast to.
pub(super) fn broadcast_shape(op: &'static str, a: &Shape, b: &Shape) -> Result<Shape> {
    a.broadcast_shape_binary_op(b, op).map_err(|_| {
        Error::shape(op, format!("{:?} and {:?}", a.dims(), b.dims())).must_be(
            "shapes that broadcast to each other",
            "counted from the last, dimensions must be equal or 1",
        )
    })
}
