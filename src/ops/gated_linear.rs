//! The first half of a gated MLP as one op: two linear maps and the gate.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::randn(0f32, 1.0, (2, 4), &Device::Cpu)?; // (..., D)
//! let w1 = Tensor::randn(0f32, 1.0, (6, 4), &Device::Cpu)?; // (F, D)
//! let w3 = Tensor::randn(0f32, 1.0, (6, 4), &Device::Cpu)?; // (F, D)
//! let in_three_ops = ops::swiglu(&ops::linear(&x, &w1)?, &ops::linear(&x, &w3)?)?;
//! let difference = (ops::swiglu_linear(&x, &w1, &w3)? - in_three_ops)?;
//! assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::Gelu;
use super::cost::Formula;
use super::dispatch::{Path, check_same, choose};
use super::gated;
use super::info::OpInfo;
use super::linear::{factors, linear, with_last_dim};
use super::lowering::{Accumulate, Calls, Lowering, Named, Signature, Slot};
use super::matmul_kernel::{Factor, matmul};
use super::operand::check_size;
use super::record::{Spec, by_kernels};
use super::weight::{self, WeightCopy, read_weight, with_copies};
use crate::graph::{Attribute, Target};
use crate::kernels::Gate;
use crate::precision::without_autocast;
use crate::probe::{Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// Computes `y = silu(x W1^T) * (x W3^T)`: x (..., D), W1 and W3 (F, D), y (..., F).
///
/// The result is that of [`swiglu()`](super::swiglu()) of two [`linear()`]s. As one op, the gradients of gate and up
/// are scratch, and dx is summed inside the second matmul: `dx = dgate W1 + dup W3`, `dW1 = dgate^T x`,
/// `dW3 = dup^T x`. Saved for backward: x, W1, W3, and gate and up, both (..., F). Autocast: lower under both policies,
/// as [`linear()`] is; silu and the product follow.
///
/// Shazeer, "GLU Variants Improve Transformer", 2020, equation 6, without the output matmul.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::randn(0f32, 1.0, (2, 3, 8), &Device::Cpu)?; // (..., D)
/// let w1 = Tensor::randn(0f32, 1.0, (16, 8), &Device::Cpu)?; // (F, D)
/// let w3 = Tensor::randn(0f32, 1.0, (16, 8), &Device::Cpu)?;
/// let y = ops::swiglu_linear(&x, &w1, &w3)?;
/// let by_three = ops::swiglu(&ops::linear(&x, &w1)?, &ops::linear(&x, &w3)?)?;
/// assert!((y - by_three)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Weights that are not matrices of one shape; a last dimension that is not their `in`; mixed dtypes or devices.
pub fn swiglu_linear(x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    gated_linear(Gate::Silu, x, w1, w3)
}

/// Computes `y = gelu(x W1^T) * (x W3^T)`, with this [form](Gelu) of GELU; otherwise like [`swiglu_linear()`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, Gelu};
///
/// let x = Tensor::randn(0f32, 1.0, (2, 3, 8), &Device::Cpu)?; // (..., D)
/// let w1 = Tensor::randn(0f32, 1.0, (16, 8), &Device::Cpu)?; // (F, D)
/// let w3 = Tensor::randn(0f32, 1.0, (16, 8), &Device::Cpu)?;
/// let y = ops::geglu_linear(&x, &w1, &w3, Gelu::Tanh)?;
/// let by_three = ops::geglu(&ops::linear(&x, &w1)?, &ops::linear(&x, &w3)?, Gelu::Tanh)?;
/// assert!((y - by_three)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`swiglu_linear()`].
pub fn geglu_linear(x: &Tensor, w1: &Tensor, w3: &Tensor, form: Gelu) -> Result<Tensor> {
    gated_linear(form.gate(), x, w1, w3)
}

fn gated_linear(gate: Gate, x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    let info = match gate {
        Gate::Silu => &SWIGLU_LINEAR,
        Gate::Gelu | Gate::GeluTanh => &GEGLU_LINEAR,
    };
    let (x, [w1, w3], copies) = with_copies(info, x, [w1, w3])?;
    check(info.op, &x, &copies[0].of(&w1), &copies[1].of(&w3))?;
    match choose(info, &x)? {
        Path::Kernel => by_kernels(info, GatedLinear { gate, copies }, [&x, &w1, &w3]),
        Path::Reference => without_autocast(|| composed(gate, &x, &w1, &w3)),
    }
}

/// Computes [`swiglu_linear()`] as three ops.
///
/// # Errors
/// Those of [`swiglu_linear()`].
pub fn swiglu_linear_reference(x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    check(SWIGLU_LINEAR.op, x, w1, w3)?;
    composed(Gate::Silu, x, w1, w3)
}

/// Computes [`geglu_linear()`] as three ops.
///
/// # Errors
/// Those of [`geglu_linear()`].
pub fn geglu_linear_reference(x: &Tensor, w1: &Tensor, w3: &Tensor, form: Gelu) -> Result<Tensor> {
    check(GEGLU_LINEAR.op, x, w1, w3)?;
    composed(form.gate(), x, w1, w3)
}

fn composed(gate: Gate, x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    gated::gated(gate, &linear(x, w1)?, &linear(x, w3)?)
}

fn check(op: &'static str, x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<()> {
    check_same(op, &[("x", x), ("w1", w1), ("w3", w3)])?;
    let fits = match (x.dims(), w1.dims()) {
        ([.., last], [_, depth]) => last == depth && w1.dims() == w3.dims(),
        _ => false,
    };
    if fits {
        return check_size(
            op,
            &with_last_dim(x.dims(), w1.dims()[0]),
            x.dtype(),
            x.device(),
        );
    }
    Err(Error::Shape {
        op,
        expected: match w1.dims() {
            [_, depth] => format!("x (..., {depth}), w1 and w3 (F, {depth})"),
            _ => "x (..., D), w1 and w3 (F, D)".into(),
        },
        got: format!("x {:?}, w1 {:?}, w3 {:?}", x.dims(), w1.dims(), w3.dims()),
        hint: "weights are stored (out, in)".into(),
    })
}

const SWIGLU_LINEAR: OpInfo = info(
    "swiglu_linear",
    "4 N D F plus 6 per element of y; backward 8 N D F plus 12 per element of y",
    |o| o.matmuls(made(o), 4.0, 6.0),
    |o| o.matmuls_backward(made(o), 8.0, 12.0),
);

const GEGLU_LINEAR: OpInfo = info(
    "geglu_linear",
    "4 N D F plus 10 per element of y; backward 8 N D F plus 18 per element of y",
    |o| o.matmuls(made(o), 4.0, 10.0),
    |o| o.matmuls_backward(made(o), 8.0, 18.0),
);

pub(crate) const INFOS: &[OpInfo] = &[SWIGLU_LINEAR, GEGLU_LINEAR];

const fn info(
    op: &'static str,
    flops: &'static str,
    forward: Formula,
    backward: Formula,
) -> OpInfo {
    let bytes = "x, W1, W3, y, gate, up; backward those and dx, dW1, dW3";
    let info = OpInfo::new(op).on_gpu();
    let info = info.costing(flops, bytes, forward, Some(backward));
    info.including("two products and the gate")
        .planned(LOWERING)
}

/// Returns the elements of y, and the bytes of y and of the saved gate and up.
fn made(o: &Operands<'_>) -> (f64, f64) {
    (o.output.elements(), 3.0 * o.output.bytes())
}

/// A plan may have both weights as one input, W1 above W3 (2 F, D); gate and up are then one value, (N, 2 F). In a
/// plan, backward overwrites gate and up with their gradients, and the gradient of y with y.
const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let (x, weight) = factors(signature); // W3 has the layout of W1
        let mut calls = Calls::default();
        let gate_up = gate_up(signature);
        for (i, (_, made)) in gate_up.iter().enumerate() {
            let factors = [("a", Slot::Input(0)), ("b", read_weight(signature, 1 + i))];
            let kernel = matmul(x, weight.t(), Accumulate::Never);
            calls.push(kernel, factors, [("c", *made)]);
        }
        let kernel = match gate_up.len() {
            1 => gated::packed(signature, weight.rows / 2),
            _ => gated::forward(signature),
        };
        calls.call(kernel, gate_up, [("y", Slot::Output)])
    },
    backward: |signature| {
        let (x, weight) = factors(signature);
        let (gate_up, mut calls) = (gate_up(signature), Calls::default());
        let dy = ("dy", Slot::OutputGradient);
        let gradients: Vec<Slot> = match signature.plan {
            Some(_) => {
                let kernel = match gate_up.len() {
                    1 => gated::packed_in_place(signature, weight.rows / 2),
                    _ => gated::backward_in_place(signature),
                };
                calls.push(kernel, [], Named::from([dy]).and(gate_up.clone()));
                gate_up.iter().map(|(_, slot)| *slot).collect()
            }
            None => {
                let kept = &signature.saved[0];
                let [dgate, dup] = [(); 2].map(|()| calls.scratch(kept.dims, kept.dtype));
                let reads = Named::from([dy]).and(gate_up);
                let writes = [("dgate", dgate), ("dup", dup)];
                calls.push(gated::backward(signature), reads, writes);
                vec![dgate, dup]
            }
        };
        let of_product = Factor::new(x.rows, weight.rows); // (N, F), or (N, 2 F)
        let mut accumulate = Accumulate::Never;
        for (i, gradient) in gradients.iter().enumerate() {
            let factors = [("a", *gradient), ("b", read_weight(signature, 1 + i))];
            let kernel = matmul(of_product, weight, accumulate);
            calls.push(kernel, factors, [("c", Slot::Gradient(0))]);
            accumulate = Accumulate::Always;
        }
        for (i, gradient) in gradients.into_iter().enumerate() {
            let factors = [("a", gradient), ("b", Slot::Input(0))];
            let kernel = matmul(of_product.t(), x, Accumulate::Never);
            calls.push(kernel, factors, [("c", Slot::Gradient(1 + i))]);
        }
        calls
    },
};

/// Returns the saved gate and up: two slots, or one if the weights are one input.
fn gate_up(signature: &Signature<'_>) -> Vec<(&'static str, Slot)> {
    match signature.saved.len() {
        1 => vec![("gate_up", Slot::Saved(0))],
        _ => vec![("gate", Slot::Saved(0)), ("up", Slot::Saved(1))],
    }
}

struct GatedLinear {
    gate: Gate,
    /// The copies of W1 and W3.
    copies: [WeightCopy; 2],
}

impl Spec for GatedLinear {
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        gated::attributes(self.gate)
    }

    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let [x, w1] = [&inputs[0], &inputs[1]];
        (with_last_dim(x.dims, w1.dims[0]).into(), x.dtype)
    }

    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (x, width) = (&inputs[0], inputs[1].dims[0]);
        ["gate", "up"]
            .map(|name| (name, (x.rows(), width).into(), x.dtype))
            .into()
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        weight::tensors(&self.copies)
    }

    fn extra_inputs_for_backward(&self, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
        weight::tensors_for_backward(&self.copies, &inputs[1..])
    }

    fn free_after_forward(&self) {
        self.copies.iter().for_each(WeightCopy::free_after_forward);
    }
}
