//! One parameter's state, and its update by the CPU's kernel.

use super::config::Moments;
use crate::inplace::{Element, is_supported, no_kernel, read, wide, with_mut_slice};
use crate::kernels::Update;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::adamw::{self, Moment};
use crate::ops::{check_granted_on, variable_of};
use crate::{Error, Result, graph};
use candle_core::{DType, Tensor, Var};
use half::{bf16, f16};

/// The operation's name in errors.
pub(super) const STEP: &str = "AdamW::step";

/// What a parameter's state is called, part by part.
pub(super) const KINDS: [&str; 3] = ["exp_avg", "exp_avg_sq", "master"];

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
    pub(super) fn new(name: &str, var: &Var, moments: Moments) -> Result<Self> {
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
        let moment = moments.dtype(var.dtype());
        if (var.dtype(), moment) == (DType::F64, DType::BF16) {
            return Err(Error::DType {
                op: "AdamW",
                expected: format!("parameter {name} in f16, bf16 or f32, beside moments in bf16"),
                got: "f64".into(),
                hint: "leave AdamWConfig::moments as it is by default".into(),
            });
        }
        let master = match var.dtype() {
            DType::F16 | DType::BF16 => {
                let dtype = wide(var.dtype());
                check_granted_on(var.device(), var.dims(), dtype)?;
                Some(variable_of(&var.detach().to_dtype(dtype)?)?)
            }
            _ => None,
        };
        let zeros = || {
            check_granted_on(var.device(), var.dims(), moment)?;
            Ok::<_, Error>(Var::zeros(var.shape(), moment, var.device())?)
        };
        Ok(Self {
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            master,
        })
    }

    /// The dtypes of a parameter's state, by its [`KINDS`].
    #[cfg(feature = "files")]
    pub(super) fn layout(
        var: &Var,
        moments: Moments,
    ) -> impl Iterator<Item = (&'static str, DType)> {
        let moment = moments.dtype(var.dtype());
        let master = match var.dtype() {
            DType::F16 | DType::BF16 => Some(wide(var.dtype())),
            _ => None,
        };
        KINDS
            .into_iter()
            .zip([moment, moment].into_iter().chain(master))
    }

    /// Its variables, by its [`KINDS`].
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
    match (parameter.dtype(), slot.exp_avg.dtype()) {
        (DType::F64, _) => step_full::<f64, f64>(parameter, gradient, slot, update)?,
        (_, DType::BF16) => step_with::<bf16>(parameter, gradient, slot, update)?,
        _ => step_with::<f32>(parameter, gradient, slot, update)?,
    }
    Ok(())
}

/// Of moments in `M`, computed in f32.
fn step_with<M: Element + Moment<Wide = f32>>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    let Some(master) = &slot.master else {
        return match parameter.dtype() {
            DType::F32 => step_full::<f32, M>(parameter, gradient, slot, update),
            other => no_kernel(STEP, other),
        };
    };
    match (parameter.dtype(), gradient.dtype()) {
        (DType::F16, DType::F16) => {
            step_half::<f16, f16, M>(parameter, gradient, master, slot, update)
        }
        (DType::F16, _) => step_half::<f16, f32, M>(parameter, gradient, master, slot, update),
        (DType::BF16, DType::BF16) => {
            step_half::<bf16, bf16, M>(parameter, gradient, master, slot, update)
        }
        (DType::BF16, _) => step_half::<bf16, f32, M>(parameter, gradient, master, slot, update),
        (other, _) => no_kernel(STEP, other),
    }
}

fn step_full<T: Element + Real, M: Element + Moment<Wide = T>>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    read(gradient, |g: &[T]| {
        with_mut_slice(parameter, |p: &mut [T]| {
            with_mut_slice(&slot.exp_avg, |m: &mut [M]| {
                with_mut_slice(&slot.exp_avg_sq, |v: &mut [M]| {
                    adamw::step(p, g, m, v, update);
                    Ok(())
                })
            })
        })
    })
}

fn step_half<P: Element<Wide = f32>, G: Element<Wide = f32>, M: Element + Moment<Wide = f32>>(
    parameter: &Tensor,
    gradient: &Tensor,
    master: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    read(gradient, |g: &[G]| {
        with_mut_slice(parameter, |p: &mut [P]| {
            with_mut_slice(master, |master: &mut [f32]| {
                with_mut_slice(&slot.exp_avg, |m: &mut [M]| {
                    with_mut_slice(&slot.exp_avg_sq, |v: &mut [M]| {
                        adamw::step_half(p, g, master, m, v, update);
                        Ok(())
                    })
                })
            })
        })
    })
}
