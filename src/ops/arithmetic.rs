//! Sums, differences, products and quotients, of mixed dtypes too.

use super::cast::cast;
use super::cast::converted;
use super::check_same;
use super::cpu::{for_stored, output, view};
use super::dispatch::{Path, choose_where};
use super::lowering::{Calls, Kernel, Lowering, Signature, Slot};
use super::operand::{check_size, is_half, operand, sums_in_half, without_repeats};
use super::record::{Spec, apply2, composed, contiguous, like_first};
use super::strided;
use crate::kernels::cpu::arithmetic as kernel;
use crate::precision::{self, Operand, is_castable};
use crate::probe::Operand as Shaped;
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Tensor};

/// `a + b`, elementwise.
///
/// As the other three: dtypes are promoted as in PyTorch, inside and outside of autocast regions (f16 + f32 is f32,
/// f16 + bf16 is f32, anything + f64 is f64, an integer takes the float's; a tensor without dimensions takes the dtype
/// of one with dimensions, unless that is an integer), shapes broadcast to each other, and each operand's gradient has
/// its own dtype and shape. candle's own `+` takes one dtype only. Half precision is computed in f32 and rounded once,
/// and so are the sums of a broadcast operand's gradient.
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
    let (a, b) = (operand_once(op, a)?, operand_once(op, b)?);
    let Some(dtype) = result_dtype(op, &a.view, &b.view) else {
        return Err(Error::DType {
            op,
            expected: "f16, bf16, f32 or f64, in one operand at least".into(),
            got: format!(
                "{} and {}",
                a.view.dtype().as_str(),
                b.view.dtype().as_str()
            ),
            hint: "candle's own operators take integers".into(),
        });
    };
    let Ok(shape) = a.shape.broadcast_shape_binary_op(&b.shape, op) else {
        return Err(Error::Shape {
            op,
            expected: "shapes that broadcast to each other".into(),
            got: format!("{:?} and {:?}", a.shape.dims(), b.shape.dims()),
            hint: "counted from the last, dimensions must be equal or 1".into(),
        });
    };
    check_size(op, shape.dims(), dtype, a.view.device())?;
    // The gradient of a broadcast is a sum, and candle's sums of half precision run out of digits; its quotients have a
    // backward of three roundings.
    let broadcasts = [&a, &b].iter().any(|x| x.view.shape() != &shape);
    let in_f32 = is_half(dtype) && (broadcasts || op == "div");
    let cast_operand = |x: &Once| -> Result<Tensor> {
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
    let has_kernel = is_half(dtype) && !in_f32 && a.device().is_cpu();
    match Arithmetic::of(op) {
        Some(kernel) if has_kernel && choose_where(op, &a, true)? == Path::Kernel => {
            Ok(apply2(&contiguous(&a)?, &contiguous(&b)?, kernel)?)
        }
        _ => composed(op, &[&a, &b], (shape, dtype), || {
            cast(&apply(&a, &b)?, dtype)
        }),
    }
}

/// An operand, and the shape that it stands for.
struct Once {
    /// In half precision, a broadcast view with each element once: its gradient is summed here, not by candle.
    view: Tensor,
    shape: Shape,
}

fn operand_once(op: &'static str, x: &Tensor) -> Result<Once> {
    let shape = x.shape().clone();
    check_size(op, x.dims(), x.dtype(), x.device())?;
    let view = match sums_in_half(x) {
        true => without_repeats(x)?,
        false => operand(op, x)?,
    };
    Ok(Once { view, shape })
}

/// What PyTorch returns for these, after the casts of an autocast policy.
fn result_dtype(op: &str, a: &Tensor, b: &Tensor) -> Option<DType> {
    let mut operands = [Operand::from(a), Operand::from(b)];
    if let Some(target) = precision::decide(op, &operands) {
        for x in operands.iter_mut().filter(|x| is_castable(x.dtype)) {
            x.dtype = target;
        }
    }
    precision::promoted(&operands)
}

/// Reads a and b; writes y: an elementwise kernel of two.
macro_rules! elementwise {
    ($name:literal, $kernel:path) => {
        Kernel::new($name, |_, s| {
            for_stored!(s.dtype(0), T => {
                $kernel(s.x::<T>(0)?, s.x(1)?, s.y(0)?);
                Ok(())
            })
        })
    };
}
/// In a plan.
pub(super) const LOWERINGS: &[Lowering] = &[
    Lowering {
        op: "add",
        forward: |signature| forward(signature, elementwise!("add", kernel::add)),
        backward: |signature| {
            let mut backward = Backward::new(signature);
            backward.pass_on(0);
            backward.pass_on(1);
            backward.calls
        },
    },
    Lowering {
        op: "sub",
        forward: |signature| forward(signature, elementwise!("sub", kernel::sub)),
        backward: |signature| {
            let mut backward = Backward::new(signature);
            backward.pass_on(0);
            let dy = backward.dy;
            backward.gradient(1, elementwise!("neg", kernel::negated), [dy, dy]);
            backward.calls
        },
    },
    Lowering {
        op: "mul",
        forward: |signature| forward(signature, elementwise!("mul", kernel::mul)),
        backward: |signature| {
            let mut backward = Backward::new(signature);
            let (dy, [a, b]) = (backward.dy, backward.repeated());
            backward.gradient(0, elementwise!("mul", kernel::mul), [dy, b]);
            backward.gradient(1, elementwise!("mul", kernel::mul), [dy, a]);
            backward.calls
        },
    },
    Lowering {
        op: "div",
        forward: |signature| forward(signature, elementwise!("div", kernel::div)),
        backward: |signature| {
            let mut backward = Backward::new(signature);
            let (dy, [a, b]) = (backward.dy, backward.repeated());
            backward.gradient(0, elementwise!("div", kernel::div), [dy, b]);
            // db = -(dy a / b) / b
            let times = backward.step(elementwise!("mul", kernel::mul), [dy, a]);
            let quotient = backward.step(elementwise!("div", kernel::div), [times, b]);
            let divided = elementwise!("negated_div", kernel::negated_div);
            backward.gradient(1, divided, [quotient, b]);
            backward.calls
        },
    },
];

/// `f` of both inputs in the output's shape, rounded where the output is.
fn forward(signature: &Signature<'_>, kernel: Kernel) -> Calls {
    let mut calls = Calls::default();
    let reads = [0, 1].map(|input| repeated(&mut calls, signature, input));
    match is_rounded(signature) {
        false => calls.call(kernel, &reads, &[Slot::Output]),
        true => {
            let wide = calls.scratch(signature.output.dims, signature.inputs[0].dtype);
            let calls = calls.call(kernel, &reads, &[wide]);
            calls.call(converted(), &[wide], &[Slot::Output])
        }
    }
}

/// Whether the result is rounded from what it is computed in.
fn is_rounded(signature: &Signature<'_>) -> bool {
    signature.output.dtype != signature.inputs[0].dtype
}

/// An input in the output's shape.
fn repeated(calls: &mut Calls, signature: &Signature<'_>, input: usize) -> Slot {
    let (x, shape) = (&signature.inputs[input], signature.output.dims);
    if x.dims == shape {
        return Slot::Input(input);
    }
    let copy = calls.scratch(shape, x.dtype);
    let kernel = strided::gather(strided::broadcast(x.dims, shape));
    calls.push(kernel, &[Slot::Input(input)], &[copy]);
    copy
}

/// A backward in the making.
struct Backward<'a> {
    signature: &'a Signature<'a>,
    calls: Calls,
    /// The output's gradient, in the dtype that is computed in.
    dy: Slot,
}

impl<'a> Backward<'a> {
    fn new(signature: &'a Signature<'a>) -> Self {
        let mut calls = Calls::default();
        let dy = match is_rounded(signature) {
            false => Slot::OutputGradient,
            true => {
                let wide = calls.scratch(signature.output.dims, signature.inputs[0].dtype);
                calls.push(converted(), &[Slot::OutputGradient], &[wide]);
                wide
            }
        };
        Self {
            signature,
            calls,
            dy,
        }
    }

    /// Both inputs in the output's shape.
    fn repeated(&mut self) -> [Slot; 2] {
        [0, 1].map(|input| repeated(&mut self.calls, self.signature, input))
    }

    /// What `kernel` makes of these, in the output's shape.
    fn step(&mut self, kernel: Kernel, reads: [Slot; 2]) -> Slot {
        let (shape, dtype) = (self.signature.output.dims, self.signature.inputs[0].dtype);
        let made = self.calls.scratch(shape, dtype);
        self.calls.push(kernel, &reads, &[made]);
        made
    }

    /// What `kernel` makes of these is the gradient of an input, summed where that was repeated.
    fn gradient(&mut self, input: usize, kernel: Kernel, reads: [Slot; 2]) {
        if self.is_repeated(input) {
            let made = self.step(kernel, reads);
            self.sum(input, made);
        } else {
            self.calls.push(kernel, &reads, &[Slot::Gradient(input)]);
        }
    }

    /// The output's gradient is that of an input.
    fn pass_on(&mut self, input: usize) {
        if self.is_repeated(input) {
            self.sum(input, self.dy);
        } else if is_rounded(self.signature) {
            let reads = [Slot::OutputGradient];
            self.calls
                .push(converted(), &reads, &[Slot::Gradient(input)]);
        } else {
            self.calls.same.push(input);
        }
    }

    fn is_repeated(&self, input: usize) -> bool {
        self.signature.inputs[input].dims != self.signature.output.dims
    }

    fn sum(&mut self, input: usize, gradient: Slot) {
        let (x, shape) = (&self.signature.inputs[input], self.signature.output.dims);
        let kernel = strided::scatter(strided::broadcast(x.dims, shape));
        self.calls
            .push(kernel, &[gradient], &[Slot::Gradient(input)]);
    }
}

/// Reads a and b; writes a + b, of one shape and dtype.
pub(crate) fn sum() -> Kernel {
    elementwise!("add", kernel::add)
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
    fn output(&self, inputs: &[Shaped<'_>]) -> (Shape, DType) {
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
