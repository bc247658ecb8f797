//! One parameter's state, and its update by the CPU's kernel.

use crate::inplace::{Element, is_supported, no_kernel, read, wide, with_mut_slice};
use crate::kernels::Update;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::adamw;
use crate::{Error, Result, graph};
use candle_core::{DType, Tensor, Var};
use half::{bf16, f16};

/// The operation's name in errors.
pub(super) const STEP: &str = "AdamW::step";

/// A parameter's state.
#[derive(Debug)]
pub(super) struct Slot {
    /// Running mean of the gradient.
    pub(super) exp_avg: Var,
    /// Running mean of the gradient's square.
    pub(super) exp_avg_sq: Var,
    /// The parameter's value in `f32`, where the parameter is half precision.
    pub(super) master: Option<Var>,
}

impl Slot {
    /// The state before the first step.
    pub(super) fn new(name: &str, var: &Var) -> Result<Self> {
        if graph::is_hollow(var) {
            return Err(Error::Order {
                op: "AdamW",
                problem: format!("parameter {name} is hollow: it has no elements to train"),
                hint:
                    "build the model from nn::seeded or a file; hollow weights are for graph::trace"
                        .into(),
            });
        }
        if !is_supported(var.dtype()) {
            return Err(Error::DType {
                op: "AdamW",
                expected: format!("parameter {name} in f16, bf16, f32 or f64"),
                got: var.dtype().as_str().to_string(),
                hint: "leave variables that are not trained out".into(),
            });
        }
        let state = wide(var.dtype());
        let master = match var.dtype() {
            DType::F16 | DType::BF16 => Some(Var::from_tensor(&var.detach().to_dtype(state)?)?),
            _ => None,
        };
        Ok(Self {
            exp_avg: Var::zeros(var.shape(), state, var.device())?,
            exp_avg_sq: Var::zeros(var.shape(), state, var.device())?,
            master,
        })
    }

    /// Its variables.
    pub(super) fn vars(&self) -> impl Iterator<Item = &Var> {
        [&self.exp_avg, &self.exp_avg_sq]
            .into_iter()
            .chain(&self.master)
    }
}

/// The kernel on candle's storages. The gradient is one of `readable_gradients`.
pub(super) fn step_cpu(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> Result<()> {
    let Some(master) = &slot.master else {
        match parameter.dtype() {
            DType::F32 => step_full::<f32>(parameter, gradient, slot, update),
            DType::F64 => step_full::<f64>(parameter, gradient, slot, update),
            other => no_kernel(STEP, other),
        }?;
        return Ok(());
    };
    match (parameter.dtype(), gradient.dtype()) {
        (DType::F16, DType::F16) => {
            step_half::<f16, f16>(parameter, gradient, master, slot, update)
        }
        (DType::F16, _) => step_half::<f16, f32>(parameter, gradient, master, slot, update),
        (DType::BF16, DType::BF16) => {
            step_half::<bf16, bf16>(parameter, gradient, master, slot, update)
        }
        (DType::BF16, _) => step_half::<bf16, f32>(parameter, gradient, master, slot, update),
        (other, _) => no_kernel(STEP, other),
    }?;
    Ok(())
}

fn step_full<T: Element + Real>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    read(gradient, |g: &[T]| {
        with_mut_slice(parameter, |p: &mut [T]| {
            with_mut_slice(&slot.exp_avg, |m: &mut [T]| {
                with_mut_slice(&slot.exp_avg_sq, |v: &mut [T]| {
                    adamw::step(p, g, m, v, update);
                    Ok(())
                })
            })
        })
    })
}

fn step_half<P: Element<Wide = f32>, G: Element<Wide = f32>>(
    parameter: &Tensor,
    gradient: &Tensor,
    master: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    read(gradient, |g: &[G]| {
        with_mut_slice(parameter, |p: &mut [P]| {
            with_mut_slice(master, |master: &mut [f32]| {
                with_mut_slice(&slot.exp_avg, |m: &mut [f32]| {
                    with_mut_slice(&slot.exp_avg_sq, |v: &mut [f32]| {
                        adamw::step_half(p, g, master, m, v, update);
                        Ok(())
                    })
                })
            })
        })
    })
}
