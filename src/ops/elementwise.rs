//! Elementwise functions of one input: exponentials, logarithms, powers and roots, absolute values, bounds and scaling.

use super::arithmetic::lowering::{div, mul, scale};
use super::cast::{cast, cast_for};
use super::dispatch::{Path, choose};
use super::info::{OpInfo, per_element};
use super::lowering::{
    Calls, Lowering, Slot, kernel, map_backward as backward, map_forward as forward,
};
use super::operand::check_supported;
use super::record::{CallSpec, by_kernels, composed_as, input};
use crate::graph::Attribute;
use crate::kernels::cpu::arithmetic as kernel;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// Computes `y = exp(x)`, elementwise.
///
/// The following also holds for the other functions of one input: [`log()`], [`pow()`], [`rsqrt()`], [`sqrt()`],
/// [`abs()`], [`clamp()`] and [`affine()`].
///
/// y has the dtype of x. Half precision is computed in f32 and rounded once, forward and backward. Under CUDA's
/// autocast policy `exp`, `log`, `pow` and `rsqrt` are an exception, as in PyTorch: x is cast to f32 first, and y is
/// f32.
///
/// Saved for backward: y for `exp`, nothing for `affine`, x (in f32 if it was cast) for the others.
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

/// Computes `y = sqrt(x)`, elementwise; otherwise like [`exp`]. Backward: `dx = dy / (2 sqrt(x))`, infinite at 0.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[0.25f32, 1.0, 9.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::sqrt(&x)?.to_vec1::<f32>()?, [0.5, 1.0, 3.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn sqrt(x: &Tensor) -> Result<Tensor> {
    in_f32(&SQRT_INFO, x, x.shape(), Tensor::sqrt)
}

/// Computes `y = |x|`, elementwise; otherwise like [`exp`]. Backward: `dx = dy sign(x)`, 0 at 0.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[-2f32, 0.0, 3.0], &Device::Cpu)?;
/// let y = ops::abs(&x)?;
/// assert_eq!(y.to_vec1::<f32>()?, [2.0, 0.0, 3.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [-1.0, 0.0, 1.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn abs(x: &Tensor) -> Result<Tensor> {
    // candle's own gradient at 0 is 1.
    in_f32(&ABS_INFO, x, x.shape(), |x| x * x.detach().sign()?)
}

/// Computes `y = min(max(x, lowest), highest)`, elementwise; otherwise like [`exp`]. NaN stays NaN. An infinite bound
/// is no bound. Backward: dx is dy where `lowest < x < highest`, else 0, as in PyTorch 2.15.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[-2f32, 0.5, 1.0, 3.0], &Device::Cpu)?;
/// let y = ops::clamp(&x, f64::NEG_INFINITY, 1.0)?;
/// assert_eq!(y.to_vec1::<f32>()?, [-2.0, 0.5, 1.0, 1.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [1.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`]; a bound that is NaN, or a lowest value above the highest.
pub fn clamp(x: &Tensor, lowest: f64, highest: f64) -> Result<Tensor> {
    if lowest.is_nan() || highest.is_nan() || lowest > highest {
        return Err(
            Error::config("clamp", "lowest, highest", format!("{lowest}, {highest}")).must_be(
                "two numbers in ascending order",
                "an infinite bound is no bound",
            ),
        );
    }
    let attributes = vec![
        ("lowest", Attribute::Number(lowest)),
        ("highest", Attribute::Number(highest)),
    ];
    with_attributes(&CLAMP_INFO, x, x.shape(), attributes, |x| {
        let filled = |value: f64| Tensor::full(value, x.shape(), x.device())?.to_dtype(x.dtype());
        let (lowest, highest) = (filled(lowest)?, filled(highest)?);
        let (below, above) = (x.lt(&lowest)?, x.gt(&highest)?);
        let bounded = above.where_cond(&highest, &x.detach())?;
        let bounded = below.where_cond(&lowest, &bounded)?;
        let is_inside = (x.gt(&lowest)? * x.lt(&highest)?)?;
        is_inside.where_cond(x, &bounded)
    })
}

/// Computes `y = scale x + summand`, elementwise; otherwise like [`exp`]. Backward: `dx = scale dy`.
///
/// The product is rounded before the sum. In f64 both numbers are used as they are; in f32 and half precision they are
/// rounded to f32. [`add`](super::add) and [`mul`](super::mul) with a tensor without dimensions have gradients for
/// both.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[1f32, -2.0], &Device::Cpu)?;
/// let y = ops::affine(&x, -1.0, 1.0)?; // 1 - x
/// assert_eq!(y.to_vec1::<f32>()?, [0.0, 3.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [-1.0, -1.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`exp`].
pub fn affine(x: &Tensor, scale: f64, summand: f64) -> Result<Tensor> {
    let attributes = vec![
        ("scale", Attribute::Number(scale)),
        ("summand", Attribute::Number(summand)),
    ];
    with_attributes(&AFFINE_INFO, x, x.shape(), attributes, |x| match scale {
        0.0 => (x * x.zeros_like()?)? + summand, // candle drops the graph of a product with the number 0
        _ => x.affine(scale, summand),
    })
}

const EXP_INFO: OpInfo = per_element!(map_info("exp", EXP), 1, 2, MAP_BYTES);
const LOG_INFO: OpInfo = per_element!(map_info("log", LOG), 1, 2, MAP_BYTES);
const POW_INFO: OpInfo = per_element!(map_info("pow", POW), 1, 2, MAP_BYTES);
const RSQRT_INFO: OpInfo = per_element!(map_info("rsqrt", RSQRT), 2, 3, MAP_BYTES);

const SQRT_INFO: OpInfo = per_element!(map_info("sqrt", SQRT), 1, 3, MAP_BYTES);
const ABS_INFO: OpInfo = per_element!(map_info("abs", ABS), 1, 1, MAP_BYTES);
const CLAMP_INFO: OpInfo = per_element!(map_info("clamp", CLAMP), 2, 2, MAP_BYTES);
const AFFINE_INFO: OpInfo = map_info("affine", AFFINE).costing(
    "2 an element, backward 1",
    "x, y; backward dy, dx",
    |o| o.elementwise(2.0),
    Some(|o| o.moved_back(1.0)),
);

const MAP_BYTES: &str = "x, y; backward x or y, dy, dx";

const fn map_info(op: &'static str, lowering: Lowering) -> OpInfo {
    OpInfo::new(op)
        .on_gpu_up_to(usize::MAX)
        .planned_composed(lowering)
}

pub(super) const INFOS: &[OpInfo] = &[
    EXP_INFO,
    LOG_INFO,
    POW_INFO,
    RSQRT_INFO,
    SQRT_INFO,
    ABS_INFO,
    CLAMP_INFO,
    AFFINE_INFO,
];

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

/// The lowering of a function of x whose backward reads dy and x.
macro_rules! of_x {
    ($name:literal, $forward:path, $backward:path) => {
        Lowering {
            forward: |_| {
                forward(kernel!($name, |T, _, s| $forward(
                    s.x::<T>("x")?,
                    s.y("y")?
                )))
            },
            backward: |_| {
                let kernel = kernel!(concat!($name, "_backward"), |T, _, s| {
                    $backward(s.x::<T>("dy")?, s.x("x")?, s.y("dx")?)
                });
                backward(kernel, ("x", Slot::Input(0)))
            },
        }
    };
}

const RSQRT: Lowering = of_x!("rsqrt", kernel::rsqrt, kernel::rsqrt_backward);
const SQRT: Lowering = of_x!("sqrt", kernel::sqrt, kernel::sqrt_backward);
const ABS: Lowering = of_x!("abs", kernel::abs, kernel::abs_backward);

const CLAMP: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("clamp", |T, k, s| {
            let bounds = [k.number("lowest")?, k.number("highest")?];
            kernel::clamp(s.x::<T>("x")?, bounds, s.y("y")?)
        });
        forward(kernel.with_all(signature.attributes))
    },
    backward: |signature| {
        let kernel = kernel!("clamp_backward", |T, k, s| {
            let bounds = [k.number("lowest")?, k.number("highest")?];
            kernel::clamp_backward(s.x::<T>("dy")?, s.x("x")?, bounds, s.y("dx")?)
        });
        let kernel = kernel.with_all(signature.attributes);
        backward(kernel, ("x", Slot::Input(0)))
    },
};

const AFFINE: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("affine", |T, k, s| {
            let numbers = [k.number("scale")?, k.number("summand")?];
            kernel::affine(s.x::<T>("x")?, numbers, s.y("y")?)
        });
        forward(kernel.with_all(signature.attributes))
    },
    backward: |signature| {
        let kernel = scale().with_all(signature.attributes);
        let dy = Slot::OutputGradient;
        Calls::default().call(kernel, [("a", dy)], [("y", Slot::Gradient(0))])
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
