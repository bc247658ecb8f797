//! The state of a parameter and its update, by the CPU kernel or by candle's own ops.

use super::config::Moments;
use crate::inplace::{is_supported, read, wide, with_mut_slice};
use crate::kernels::cpu::adamw::{self, Moment};
use crate::kernels::cpu::{Real, Stored};
use crate::kernels::{Update, stochastic};
use crate::ops::{check_granted_on, variable_of};
use crate::{Error, Result, graph};
use candle_core::{DType, Device, Tensor, Var};
use half::{bf16, f16};

pub(super) const STEP: &str = "AdamW::step";

/// The names of the tensors of a parameter's state.
pub(super) const KINDS: [&str; 3] = ["exp_avg", "exp_avg_sq", "master"];

/// The state of a parameter.
#[derive(Debug)]
pub(super) struct Slot {
    /// The running mean of the gradient.
    pub(super) exp_avg: Var,
    /// The running mean of the gradient's square.
    pub(super) exp_avg_sq: Var,
    /// The value in f32, if the parameter is in half precision.
    pub(super) master: Option<Var>,
}

impl Slot {
    pub(super) fn new(name: &str, var: &Var, moments: Moments) -> Result<Self> {
        if graph::is_meta(var) {
            return Err(Error::order(
                "AdamW",
                format!("parameter {name} is a meta tensor, which has no data to train"),
                "build the model from nn::seeded or a file; meta weights are for graph::trace",
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
                format!("parameter {name} in f16, bf16 or f32, with moments in bf16"),
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

    /// Returns the dtypes of a parameter's state, in the order of [`KINDS`].
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

/// Updates a parameter in half precision with moments in `M`; computes in f32.
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

/// Updates a parameter with candle's own ops, on any device.
pub(super) fn step_reference(
    parameter: &Var,
    gradient: &Tensor,
    slot: &Slot,
    update: &Update,
) -> Result<()> {
    let moments = slot.exp_avg.dtype();
    let computed = wide(parameter.dtype());
    let g = gradient.to_dtype(computed)?;
    let current = parameter.detach();
    let p = match &slot.master {
        None => current,
        Some(master) => {
            // The master value, unless the parameter was set since.
            let master = master.detach();
            let unchanged = master.to_dtype(parameter.dtype())?.eq(&current)?;
            unchanged.where_cond(&master, &current.to_dtype(master.dtype())?)?
        }
    };
    let m = slot.exp_avg.detach().to_dtype(computed)?;
    let v = slot.exp_avg_sq.detach().to_dtype(computed)?;
    let m = (&m + ((&g - &m)? * update.one_minus_beta1)?)?;
    let v = ((v * update.beta2)? + ((&g * update.one_minus_beta2)? * &g)?)?;
    let denominator = ((v.sqrt()? / update.second_correction)? + update.eps)?;
    let p = ((p * update.decay)? - ((&m * update.step_size)? / denominator)?)?;
    let stored = |moment: &Tensor, shift| match moments == computed {
        true => Ok(moment.clone()),
        false => rounded(moment, update, shift),
    };
    slot.exp_avg.set(&stored(&m, 0)?)?;
    slot.exp_avg_sq.set(&stored(&v, 16)?)?;
    parameter.set(&p.to_dtype(parameter.dtype())?)?;
    if let Some(master) = &slot.master {
        master.set(&p)?;
    }
    Ok(())
}

/// Rounds a moment to bf16 stochastically, by 16 random bits of each element from bit `shift` on. It runs on the host,
/// since candle has no ops on bits.
fn rounded(moment: &Tensor, update: &Update, shift: u32) -> candle_core::Result<Tensor> {
    let values = moment.flatten_all()?.to_vec1::<f32>()?;
    let values = values.iter().enumerate().map(|(i, x)| {
        let random = stochastic::bits(update.rounding, i as u32) >> shift & 0xffff;
        stochastic::round_to_bf16(*x, random)
    });
    let values = Tensor::from_iter(values, &Device::Cpu)?;
    let values = values.reshape(moment.shape())?.to_dtype(DType::BF16)?;
    values.to_device(moment.device())
}
