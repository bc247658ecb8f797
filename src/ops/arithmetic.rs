//! Sums, differences, products and quotients, of mixed dtypes too.

use super::cast::{cast, cast_for};
use super::check_same;
use super::cpu::{for_stored, output, view};
use super::dispatch::{Path, choose_where};
use super::record::{Spec, apply2, composed, contiguous, like_first};
use crate::kernels::cpu::arithmetic as kernel;
use crate::precision;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Tensor};

/// `a + b`, elementwise.
///
/// As the other three: dtypes are promoted as in PyTorch, inside and outside of autocast regions (f16 + f32 is f32,
/// f16 + bf16 is f32, anything + f64 is f64, an integer takes the float's), shapes broadcast to each other, and each
/// operand's gradient has its own dtype and shape. candle's own `+` takes one dtype only. Half precision is computed in f32
/// and rounded once.
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
/// Shapes that do not broadcast, different devices, two integers.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("add", a, b, Tensor::broadcast_add)
}

/// `a - b`, elementwise; otherwise as [`add`].
///
/// # Errors
/// As [`add`].
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("sub", a, b, Tensor::broadcast_sub)
}

/// `a * b`, elementwise; otherwise as [`add`].
///
/// # Errors
/// As [`add`].
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("mul", a, b, Tensor::broadcast_mul)
}

/// `a / b`, elementwise; otherwise as [`add`].
///
/// # Errors
/// As [`add`].
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("div", a, b, Tensor::broadcast_div)
}

fn binary(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    apply: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let [a, b] = cast_for(op, [a, b])?;
    let Some(dtype) = precision::promoted(&[a.dtype(), b.dtype()]) else {
        return Err(Error::DType {
            op,
            expected: "f16, bf16, f32 or f64, in one operand at least".into(),
            got: format!("{} and {}", a.dtype().as_str(), b.dtype().as_str()),
            hint: "candle's own operators take integers".into(),
        });
    };
    let (a, b) = (cast(&a, dtype)?, cast(&b, dtype)?);
    check_same(op, &[("a", &a), ("b", &b)])?;
    let Ok(shape) = a.shape().broadcast_shape_binary_op(b.shape(), op) else {
        return Err(Error::Shape {
            op,
            expected: "shapes that broadcast to each other".into(),
            got: format!("{:?} and {:?}", a.dims(), b.dims()),
            hint: "counted from the last, dimensions must be equal or 1".into(),
        });
    };
    let half = matches!(dtype, DType::F16 | DType::BF16);
    let spread = |x: Tensor| -> Result<Tensor> {
        if !half || x.shape() == &shape || !x.track_op() {
            return Ok(x);
        }
        // The gradient of a broadcast is a sum, and candle's sums of half precision run out of digits: this one is f32's.
        let wide = x.to_dtype(DType::F32)?.broadcast_as(&shape)?;
        Ok(wide.to_dtype(dtype)?)
    };
    let (a, b) = (spread(a)?, spread(b)?);
    let has_kernel = half && a.device().is_cpu() && a.shape() == b.shape();
    match Arithmetic::of(op) {
        Some(kernel) if has_kernel && choose_where(op, &a, true)? == Path::Kernel => {
            Ok(apply2(&contiguous(&a)?, &contiguous(&b)?, kernel)?)
        }
        _ => composed(op, &[&a, &b], (shape, dtype), || Ok(apply(&a, &b)?)),
    }
}

/// What has a kernel for half precision, of which candle's own sums take 10 to 50 times as long as f32's.
enum Arithmetic {
    Add,
    Sub,
    Mul,
}

impl Arithmetic {
    fn of(op: &str) -> Option<Self> {
        match op {
            "add" => Some(Self::Add),
            "sub" => Some(Self::Sub),
            "mul" => Some(Self::Mul),
            _ => None,
        }
    }
}

impl Spec for Arithmetic {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        like_first(inputs)
    }
}

impl CustomOp2 for Arithmetic {
    fn name(&self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
        }
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        for_stored!(a.dtype(), T => {
            let (a, b) = (view::<T>(a, a_layout)?, view::<T>(b, b_layout)?);
            output(a_layout.shape(), |y| match self {
                Self::Add => kernel::add(a, b, y),
                Self::Sub => kernel::sub(a, b, y),
                Self::Mul => kernel::mul(a, b, y),
            })
        })
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = dy.detach().contiguous()?;
        let times = |x: &Tensor| dy.apply_op2_no_bwd(&x.detach(), &Self::Mul);
        let (da, db) = match self {
            Self::Add => (dy.clone(), dy),
            Self::Sub => (dy.clone(), dy.neg()?),
            Self::Mul => (times(b)?, times(a)?),
        };
        Ok((Some(da), Some(db)))
    }
}
