//! Gated activations: silu(gate) up and gelu(gate) up.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let gate = Tensor::new(&[-1f32, 0.5, 3.0], &Device::Cpu)?;
//! let up = Tensor::new(&[2f32, -1.0, 0.5], &Device::Cpu)?;
//! let difference = (ops::swiglu(&gate, &up)? - (ops::silu(&gate)? * &up)?)?;
//! assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::Gelu;
use super::activation;
use super::cast::cast_for;
use super::dispatch::check_same;
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Kernel, Lowering, Signature, Slot, kernel, on_gpu};
use super::record::{CallSpec, run, wide_input};
use crate::graph::Attribute;
use crate::kernels::cpu::gated as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::gated as cuda_kernel;
use crate::kernels::{Activation, Gate};
use crate::{Error, Result};
use candle_core::Tensor;

/// Computes `y = silu(gate) * up`, elementwise, with silu(g) = g sigmoid(g): all three of one shape.
///
/// Backward, with s = sigmoid(gate): `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`. Saved for backward: gate
/// and up; s is recomputed, which costs less than reading it. Autocast: follows its inputs.
///
/// Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let gate = Tensor::new(&[-1000f32, 0.0, 1000.0], &Device::Cpu)?;
/// let up = Tensor::new(&[3f32, 3.0, 3.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::swiglu(&gate, &up)?.to_vec1::<f32>()?, [0.0, 0.0, 3000.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that differ; mixed dtypes or devices.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(Gate::Silu, gate, up)
}

/// Computes `y = gelu(gate) * up`, elementwise, with this [form](Gelu) of GELU: all three of one shape.
///
/// Backward: `dgate = dy up gelu'(gate)`, `dup = dy gelu(gate)`. Saved for backward: gate and up. Autocast: follows its
/// inputs.
///
/// Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, Gelu};
///
/// let gate = Tensor::new(&[-1f32, 0.5, 3.0], &Device::Cpu)?;
/// let up = Tensor::new(&[2f32, -1.0, 0.5], &Device::Cpu)?;
/// let by_two = (ops::gelu(&gate, Gelu::Tanh)? * &up)?;
/// let difference = (ops::geglu(&gate, &up, Gelu::Tanh)? - by_two)?;
/// assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`swiglu()`].
pub fn geglu(gate: &Tensor, up: &Tensor, form: Gelu) -> Result<Tensor> {
    gated(form.gate(), gate, up)
}

pub(super) fn gated(f: Gate, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let info = match f {
        Gate::Silu => &SWIGLU,
        Gate::Gelu | Gate::GeluTanh => &GEGLU,
    };
    let [gate, up] = &cast_for(info.op, [gate, up])?;
    check(info.op, gate, up)?;
    let call = CallSpec::like_first().with_all(attributes(f));
    run(info, call, [gate, up], || composed(f, info.op, gate, up))
}

/// Computes [`swiglu()`] in plain candle ops.
///
/// # Errors
/// Those of [`swiglu()`].
pub fn swiglu_reference(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(SWIGLU.op, gate, up)?;
    composed(Gate::Silu, SWIGLU.op, gate, up)
}

/// Computes [`geglu()`] in plain candle ops.
///
/// # Errors
/// Those of [`geglu()`].
pub fn geglu_reference(gate: &Tensor, up: &Tensor, form: Gelu) -> Result<Tensor> {
    check(GEGLU.op, gate, up)?;
    composed(form.gate(), GEGLU.op, gate, up)
}

fn composed(f: Gate, op: &'static str, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (wide, up) = (wide_input(op, gate)?, wide_input(op, up)?);
    let activation = match f {
        Gate::Silu => Activation::Silu,
        Gate::Gelu => Activation::Gelu,
        Gate::GeluTanh => Activation::GeluTanh,
    };
    let y = (activation::formula(activation, &wide)? * up)?;
    Ok(y.to_dtype(gate.dtype())?)
}

fn check(op: &'static str, gate: &Tensor, up: &Tensor) -> Result<()> {
    check_same(op, &[("gate", gate), ("up", up)])?;
    if gate.shape() == up.shape() {
        return Ok(());
    }
    Err(Error::shape(op, format!("{:?}", up.dims())).must_be(
        format!("up {:?}, as gate", gate.dims()),
        "both come from the same input",
    ))
}

const SWIGLU: OpInfo = per_element!(
    OpInfo::new("swiglu").on_gpu().planned_composed(LOWERING),
    6,
    12,
    BYTES
);

/// The cost is that of the tanh form; the erf form costs less.
const GEGLU: OpInfo = per_element!(
    OpInfo::new("geglu").on_gpu().planned_composed(LOWERING),
    10,
    18,
    BYTES
);

pub(super) const INFOS: &[OpInfo] = &[SWIGLU, GEGLU];
const BYTES: &str = "gate, up, y; backward gate, up, dy, dgate, dup";

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let reads = [("gate", Slot::Input(0)), ("up", Slot::Input(1))];
        Calls::default().call(forward(signature), reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let reads = [
            ("dy", Slot::OutputGradient),
            ("gate", Slot::Input(0)),
            ("up", Slot::Input(1)),
        ];
        let writes = [("dgate", Slot::Gradient(0)), ("dup", Slot::Gradient(1))];
        Calls::default().call(backward(signature), reads, writes)
    },
};

/// The attribute that selects GELU's form: whether it is by tanh. SiLU does not have it.
const BY_TANH: &str = "tanh";

/// Returns the attributes of a node with this gate.
pub(super) fn attributes(f: Gate) -> Vec<(&'static str, Attribute)> {
    let by_tanh = match f {
        Gate::Silu => None,
        Gate::Gelu => Some(false),
        Gate::GeluTanh => Some(true),
    };
    let attribute = by_tanh.map(|by_tanh| (BY_TANH, Attribute::Flag(by_tanh)));
    attribute.into_iter().collect()
}

fn gate(k: &Kernel) -> Gate {
    match k.some_flag(BY_TANH) {
        None => Gate::Silu,
        Some(false) => Gate::Gelu,
        Some(true) => Gate::GeluTanh,
    }
}

/// Returns the reported names of the gate's forward and backward.
fn names(signature: &Signature<'_>) -> [&'static str; 2] {
    match signature.attribute(BY_TANH) {
        None => ["swiglu", "swiglu_backward"],
        Some(_) => ["geglu", "geglu_backward"],
    }
}

/// Reads gate and up; writes y = f(gate) * up.
pub(super) fn forward(signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!(names(signature)[0], |T, k, s| {
        kernel::forward(gate(k), s.x::<T>("gate")?, s.x("up")?, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| cuda_kernel::forward(
        l.gpu,
        gate(k),
        l.x("gate")?,
        l.x("up")?,
        l.y("y")?
    ));
    kernel.with_all(signature.attributes)
}

/// Reads dy, gate and up; writes dgate and dup.
pub(super) fn backward(signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!(names(signature)[1], |T, k, s| {
        let reads = [s.x::<T>("dy")?, s.x("gate")?, s.x("up")?];
        kernel::backward(gate(k), reads, s.y("dgate")?, s.y("dup")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let reads = [l.x("dy")?, l.x("gate")?, l.x("up")?];
        cuda_kernel::backward(l.gpu, gate(k), reads, [l.y("dgate")?, l.y("dup")?])
    });
    kernel.with_all(signature.attributes)
}

/// Overwrites dy (N, F) with f(gate) * up, gate with dgate, and up with dup.
pub(super) fn backward_in_place(signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!(names(signature)[1], of "dy", |T, k, s| {
        kernel::backward_in_place::<T>(gate(k), s.y("dy")?, s.y("gate")?, s.y("up")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let [x, up, dy] = [l.y("gate")?, l.y("up")?, l.y("dy")?];
        cuda_kernel::backward_in_place(l.gpu, gate(k), x, up, dy)
    });
    kernel.in_place().with_all(signature.attributes)
}

/// Reads gate_up (N, 2 F), with gate and up next to each other in a row; writes y (N, F), f(gate) * up. GPU only.
pub(super) fn packed(signature: &Signature<'_>, width: usize) -> Kernel {
    let kernel = on_gpu!(Kernel::of_gpus(names(signature)[0]), |k, l| {
        let width = k.count("width")?;
        cuda_kernel::packed_forward(l.gpu, gate(k), l.x("gate_up")?, l.y("y")?, width)
    });
    let kernel = kernel.sized([("width", width)]);
    kernel.with_all(signature.attributes)
}

/// Overwrites dy (N, F) with f(gate) * up, and gate_up (N, 2 F) with its gradient. GPU only.
pub(super) fn packed_in_place(signature: &Signature<'_>, width: usize) -> Kernel {
    let kernel = on_gpu!(Kernel::of_gpus(names(signature)[1]), |k, l| {
        let width = k.count("width")?;
        cuda_kernel::packed_backward_in_place(l.gpu, gate(k), l.y("gate_up")?, l.y("dy")?, width)
    });
    let kernel = kernel.sized([("width", width)]).in_place();
    kernel.with_all(signature.attributes)
}
