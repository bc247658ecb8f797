//! Unscaling of gradients and the check that they are finite; one pass on the CPU.

use super::super::clip::{are_finite, leave};
use super::{GradScaler, Progress, UNSCALE};
use crate::gradients::{Owners, gradient_of, gradients_of};
use crate::inplace::{for_stored, read, wide, with_mut_slice};
use crate::kernels::cpu::{parallel::filled, unscale as kernel};
use crate::probe::{self, Kind};
use crate::{Result, hardware, ops};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use half::f16;

impl GradScaler {
    /// Unscales the gradients of parameters. All are checked before one is changed.
    pub(super) fn unscale_all(
        &mut self,
        op: &'static str,
        gradients: &mut GradStore,
        parameters: &[(String, Var)],
    ) -> Result<()> {
        let range = probe::op(Kind::Op, UNSCALE, probe::op_path(UNSCALE));
        gradients_of(op, gradients, parameters)?;
        let factor = 1.0 / self.state.scale;
        let finite = match parameters.iter().all(|(_, var)| var.device().is_cpu()) {
            true => unscale_on_cpu(op, gradients, parameters, factor)?,
            false => unscale_on_gpu(op, gradients, parameters, factor)?,
        };
        for ((name, var), finite) in parameters.iter().zip(finite) {
            if !finite && self.non_finite.is_none() {
                self.non_finite = Some(name.clone());
            }
            let stepped = false;
            self.unscaled.insert(var.id(), Progress { finite, stepped });
        }
        leave(range, parameters);
        Ok(())
    }
}

/// Replaces each gradient by `gradient * factor`; returns whether each is finite, with one synchronization.
fn unscale_on_gpu(
    op: &'static str,
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    factor: f64,
) -> Result<Vec<bool>> {
    for (name, var) in parameters {
        let gradient = gradient_of(op, gradients, name, var)?.detach();
        let scaled = (gradient.to_dtype(kept_in(gradient.dtype()))? * factor)?;
        gradients.insert(var, scaled);
    }
    are_finite(&gradients_of(op, gradients, parameters)?)
}

/// Replaces each gradient by `gradient * factor`; returns whether each is finite.
fn unscale_on_cpu(
    op: &'static str,
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    factor: f64,
) -> Result<Vec<bool>> {
    let owners = Owners::new(gradients, parameters);
    let each = parameters.iter().map(|(name, var)| {
        let gradient = gradient_of(op, gradients, name, var)?;
        let (replacement, finite) = unscale(gradient, factor, &owners)?;
        if let Some(replacement) = replacement {
            gradients.insert(var, replacement);
        }
        Ok(finite)
    });
    each.collect()
}

/// Computes `gradient * factor` on the CPU, in place if the storage is not shared, in f32 if it is f16. Returns the new
/// tensor, if it is not in place, and whether all elements are finite.
fn unscale(gradient: &Tensor, factor: f64, owners: &Owners) -> Result<(Option<Tensor>, bool)> {
    let gradient = gradient.detach();
    if gradient.dtype() == DType::F16 {
        let (scaled, finite) = widened(&ops::try_contiguous(&gradient)?, factor)?;
        return Ok((Some(scaled), finite));
    }
    let in_place = |x: &Tensor| {
        for_stored!(x.dtype(), T => {
            with_mut_slice(x, |x: &mut [T]| Ok(kernel::in_place(x, factor)))
        })
    };
    if owners.can_overwrite(&gradient) {
        return Ok((None, in_place(&gradient)?));
    }
    ops::check_granted_on(&Device::Cpu, gradient.dims(), gradient.dtype())?;
    let copy = gradient.force_contiguous()?;
    let finite = in_place(&copy)?;
    Ok((Some(copy), finite))
}

/// Returns the dtype of an unscaled gradient: f32 for f16, whose smallest numbers are too large; bf16 has f32's range.
fn kept_in(dtype: DType) -> DType {
    match dtype {
        DType::F16 => wide(dtype),
        other => other,
    }
}

fn widened(gradient: &Tensor, factor: f64) -> Result<(Tensor, bool)> {
    let mut finite = false;
    let elements = read(gradient, |x: &[f16]| {
        filled(x.len(), |y| finite = kernel::widening(x, factor, y))
            .map_err(|_| hardware::not_granted("an unscaled gradient", 4 * x.len() as u64).into())
    })?;
    let scaled = Tensor::from_vec(elements, gradient.shape(), &Device::Cpu)?;
    Ok((scaled, finite))
}
