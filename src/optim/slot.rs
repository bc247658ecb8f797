//! One parameter's state, and its update by the CPU's kernel.

use super::config::Moments;
use crate::inplace::{is_supported, read, wide, with_mut_slice};
use crate::kernels::Update;
use crate::kernels::cpu::adamw::{self, Moment};
use crate::kernels::cpu::{Real, Stored};
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
            return Err(Error::order(
                "AdamW",
                format!("parameter {name} is hollow: it has no elements to train"),
                "build the model from nn::seeded or a file; hollow weights are for graph::trace",
            ));
        }
        if !is_supported(var.dtype()) {
            return Err(Error::dtype("AdamW", var.dtype().as_str()).must_be(
                format!("parameter {name} in f16, bf16, f32 or f64"),
                "leave variables that are not trained out",
            ));
        }
        let moment = moments.dtype(var.dtype());
        if (var.dtype(), moment) == (DType::F64, DType::BF16) {
            return Err(Error::dtype("AdamW", "f64").must_be(
                format!("parameter {name} in f16, bf16 or f32, beside moments in bf16"),
                "leave AdamWConfig::moments as it is by default",
            ));
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
        (DType::F32, DType::BF16) => step_full::<f32, bf16>(parameter, gradient, slot, update)?,
        (DType::F32, _) => step_full::<f32, f32>(parameter, gradient, slot, update)?,
        (_, DType::BF16) => step_master::<bf16>(parameter, gradient, slot, update)?,
        _ => step_master::<f32>(parameter, gradient, slot, update)?,
    }
    Ok(())
}

fn step_full<T: Real + Stored, M: Moment<Wide = T>>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    read(gradient, |g: &[T]| {
        with_mut_slice(parameter, |p: &mut [T]| {
            with_moments(slot, |m: &mut [M], v| adamw::step(p, g, m, v, update))
        })
    })
}

/// Of a parameter in half precision, with moments in `M`, computed in f32.
fn step_master<M: Moment<Wide = f32>>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    match (parameter.dtype(), gradient.dtype()) {
        (DType::F16, DType::F16) => step_half::<f16, f16, M>(parameter, gradient, slot, update),
        (DType::F16, _) => step_half::<f16, f32, M>(parameter, gradient, slot, update),
        (_, DType::BF16) => step_half::<bf16, bf16, M>(parameter, gradient, slot, update),
        _ => step_half::<bf16, f32, M>(parameter, gradient, slot, update),
    }
}

fn step_half<P: Stored<Wide = f32>, G: Stored<Wide = f32>, M: Moment<Wide = f32>>(
    parameter: &Tensor,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> candle_core::Result<()> {
    let Some(master) = &slot.master else {
        candle_core::bail!("{STEP}: a parameter in half precision has no master");
    };
    read(gradient, |g: &[G]| {
        with_mut_slice(parameter, |p: &mut [P]| {
            with_mut_slice(master, |master: &mut [f32]| {
                with_moments(slot, |m: &mut [M], v| {
                    adamw::step_half(p, g, master, m, v, update);
                })
            })
        })
    })
}

fn with_moments<M: Moment>(
    slot: &Slot,
    step: impl FnOnce(&mut [M], &mut [M]),
) -> candle_core::Result<()> {
    with_mut_slice(&slot.exp_avg, |m: &mut [M]| {
        with_mut_slice(&slot.exp_avg_sq, |v: &mut [M]| {
            step(m, v);
            Ok(())
        })
    })
}
