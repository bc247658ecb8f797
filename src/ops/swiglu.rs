//! The SwiGLU gate, silu(gate) up.
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

use super::activation::sigmoid;
use super::cast::cast_for;
use super::dispatch::check_same;
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Kernel, Lowering, Slot, kernel, on_gpu};
use super::record::{Spec, like_first, run, wide_input};
use crate::kernels::cpu::swiglu as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::swiglu as cuda_kernel;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// `y = silu(gate) * up`, elementwise, with silu(g) = g sigmoid(g): all three of one shape.
///
/// Backward, with s = sigmoid(gate): `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`. Kept for backward: gate
/// and up; s is recomputed, which costs less than reading it back. Autocast: follows its inputs.
///
/// Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
///
/// # Errors
/// Shapes that differ, mixed dtypes or devices.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let [gate, up] = &cast_for("swiglu", [gate, up])?;
    check(gate, up)?;
    run(&INFO, SwiGlu, [gate, up], || reference(gate, up))
}

/// [`swiglu()`] in plain candle ops.
///
/// # Errors
/// As [`swiglu()`].
pub fn reference(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    let (wide, up) = (wide_input("swiglu", gate)?, wide_input("swiglu", up)?);
    Ok(((&wide * sigmoid(&wide)?)? * up)?.to_dtype(gate.dtype())?)
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    check_same("swiglu", &[("gate", gate), ("up", up)])?;
    if gate.shape() == up.shape() {
        return Ok(());
    }
    Err(Error::Shape {
        op: "swiglu",
        expected: format!("up {:?}, as gate", gate.dims()),
        got: format!("{:?}", up.dims()),
        hint: "both come from the same input".into(),
    })
}

pub(super) const INFO: OpInfo = per_element!(
    OpInfo::new("swiglu").on_gpu().planned_composed(LOWERING),
    6,
    12,
    "gate, up, y; backward gate, up, dy, dgate, dup"
);

/// In a plan.
const LOWERING: Lowering = Lowering {
    forward: |_| {
        let reads = [("gate", Slot::Input(0)), ("up", Slot::Input(1))];
        Calls::default().call(gated(), reads, [("y", Slot::Output)])
    },
    backward: |_| {
        let reads = [
            ("dy", Slot::OutputGradient),
            ("gate", Slot::Input(0)),
            ("up", Slot::Input(1)),
        ];
        let writes = [("dgate", Slot::Gradient(0)), ("dup", Slot::Gradient(1))];
        Calls::default().call(gated_backward(), reads, writes)
    },
};

/// Reads gate and up; writes y, silu(gate) * up.
pub(super) fn gated() -> Kernel {
    let kernel = kernel!("swiglu", |T, _, s| {
        kernel::forward(s.x::<T>("gate")?, s.x("up")?, s.y("y")?);
    });
    on_gpu!(kernel, |_, l| cuda_kernel::forward(
        l.gpu,
        l.x("gate")?,
        l.x("up")?,
        l.y("y")?
    ))
}

/// Reads dy, gate and up; writes dgate and dup.
pub(super) fn gated_backward() -> Kernel {
    let kernel = kernel!("swiglu_backward", |T, _, s| {
        let (dy, gate, up) = (s.x::<T>("dy")?, s.x("gate")?, s.x("up")?);
        kernel::backward(dy, gate, up, s.y("dgate")?, s.y("dup")?);
    });
    on_gpu!(kernel, |_, l| {
        let reads = [l.x("dy")?, l.x("gate")?, l.x("up")?];
        cuda_kernel::backward(l.gpu, reads, [l.y("dgate")?, l.y("dup")?])
    })
}

/// Writes dy (N, F), which becomes silu(gate) * up, gate, which becomes dgate, and up, which becomes dup.
pub(super) fn gated_in_place() -> Kernel {
    let kernel = kernel!("swiglu_backward", of "dy", |T, _, s| {
        kernel::backward_in_place::<T>(s.y("dy")?, s.y("gate")?, s.y("up")?);
    });
    let kernel = on_gpu!(kernel, |_, l| {
        let [gate, up, dy] = [l.y("gate")?, l.y("up")?, l.y("dy")?];
        cuda_kernel::backward_in_place(l.gpu, gate, up, dy)
    });
    kernel.in_place()
}

/// Reads gate_up (N, 2 F), gate and up side by side; writes y (N, F), silu(gate) * up. On a GPU.
pub(super) fn packed(width: usize) -> Kernel {
    let kernel = on_gpu!(Kernel::of_gpus("swiglu"), |k, l| {
        let width = k.count("width")?;
        cuda_kernel::packed_forward(l.gpu, l.x("gate_up")?, l.y("y")?, width)
    });
    kernel.sized([("width", width)])
}

/// Writes dy (N, F), which becomes silu(gate) * up, and gate_up (N, 2 F), which become their gradients. On a GPU.
pub(super) fn packed_in_place(width: usize) -> Kernel {
    let kernel = on_gpu!(Kernel::of_gpus("swiglu_backward"), |k, l| {
        let width = k.count("width")?;
        cuda_kernel::packed_backward_in_place(l.gpu, l.y("gate_up")?, l.y("dy")?, width)
    });
    kernel.sized([("width", width)]).in_place()
}

struct SwiGlu;

impl Spec for SwiGlu {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        like_first(inputs)
    }
}
