//! AdamW's update in candle's own ops: the kernel's specification, for any device.

use super::slot::Slot;
use crate::Result;
use crate::inplace::wide;
use crate::kernels::{Update, stochastic};
use candle_core::{DType, Device, Tensor, Var};

/// Updates one parameter and its state; see [`crate::kernels::cpu::adamw`].
pub(super) fn step(parameter: &Var, gradient: &Tensor, slot: &Slot, update: &Update) -> Result<()> {
    let moments = slot.exp_avg.dtype();
    let computed = wide(parameter.dtype());
    let g = gradient.to_dtype(computed)?;
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
    let m = slot.exp_avg.detach().to_dtype(computed)?;
    let v = slot.exp_avg_sq.detach().to_dtype(computed)?;
    let m = (&m + ((&g - &m)? * update.first_share)?)?;
    let v = ((v * update.beta2)? + ((&g * update.second_share)? * &g)?)?;
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

/// A moment in bf16, rounded at random, by the 16 bits from `shift` on of each element's. On the host: candle has no
/// bits.
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
