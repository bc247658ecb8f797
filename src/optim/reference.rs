//! AdamW's update in candle's own ops: the kernel's specification, for any device.

use super::slot::Slot;
use crate::Result;
use crate::kernels::Update;
use candle_core::{Tensor, Var};

/// Updates one parameter and its state; see [`crate::kernels::cpu::adamw`].
pub(super) fn step(parameter: &Var, gradient: &Tensor, slot: &Slot, update: &Update) -> Result<()> {
    let g = gradient.to_dtype(slot.exp_avg.dtype())?;
    let current = parameter.detach();
    let p = match &slot.master {
        None => current,
        Some(master) => {
            // The parameter's exact value, unless the parameter was set since.
            let master = master.detach();
            let unchanged = master.to_dtype(parameter.dtype())?.eq(&current)?;
            unchanged.where_cond(&master, &current.to_dtype(master.dtype())?)?
        }
    };
    let m = slot.exp_avg.detach();
    let v = slot.exp_avg_sq.detach();
    let m = (&m + ((&g - &m)? * update.first_share)?)?;
    let v = ((v * update.beta2)? + ((&g * update.second_share)? * &g)?)?;
    let denominator = ((v.sqrt()? / update.second_correction)? + update.eps)?;
    let p = ((p * update.decay)? - ((&m * update.step_size)? / denominator)?)?;
    slot.exp_avg.set(&m)?;
    slot.exp_avg_sq.set(&v)?;
    parameter.set(&p.to_dtype(parameter.dtype())?)?;
    if let Some(master) = &slot.master {
        master.set(&p)?;
    }
    Ok(())
}
