//! Runs single calls on the CPU: kernels, exchanges, and the steps of the update.

use super::super::executor::not_finite;
use super::super::op::Op;
use super::super::plan::Plan;
use super::Controls;
use crate::Result;
use crate::kernels::cpu::{reduce, unscale as unscaling};
use crate::ops::cpu::{for_real, for_stored};
use crate::ops::lowering::Slices;
use crate::optim::{direction, orthogonalize, step_slices};
use candle_core::DType;
use std::ops::ControlFlow;

/// Runs a call. Returns whether the step continues after it.
///
/// # Errors
/// Gradients that are not finite, found by clipping; errors of kernels and exchanges.
pub(super) fn run(
    plan: &Plan,
    op: &Op,
    s: &Slices<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    match op {
        Op::Kernel(kernel) => kernel.run(s)?,
        Op::AllReduce { .. }
        | Op::Reduce { .. }
        | Op::Broadcast { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. } => exchange(op, s, controls)?,
        Op::CheckOverflow { .. } => return check_overflow(s),
        Op::ClipFactor { parameters } => clip_factor(plan, parameters, s, controls)?,
        Op::SumOfSquares { .. } => sum_of_squares(s)?,
        Op::Unscale { .. } => unscale(s, controls)?,
        Op::Momentum { parameter, .. } => {
            direction(s, factor(s)?, &controls.updates[*parameter])?;
        }
        Op::Orthogonalize { rule, shape, .. } => orthogonalize(s, &rule.iteration(shape))?,
        Op::Update { parameter, .. } => {
            step_slices(s, factor(s)?, &controls.updates[*parameter])?;
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn exchange(op: &Op, s: &Slices<'_>, controls: &Controls<'_>) -> candle_core::Result<()> {
    let Some(communicator) = controls.communicator else {
        return Ok(()); // `Step` has checked that there is one
    };
    let collectives = op.collectives(communicator.world_size());
    let mut collectives = collectives.into_iter();
    if s.dtype_of("x")? == DType::U8 {
        let x = s.y::<u8>("x")?;
        collectives.try_for_each(|(what, some)| communicator.run_on_host(what, &mut x[some]))?;
        return Ok(());
    }
    for_stored!(s.dtype_of("x")?, T => {
        let x = s.y::<T>("x")?;
        collectives.try_for_each(|(what, some)| communicator.run_on_host(what, &mut x[some]))?;
        Ok(())
    })
}

fn sum_of_squares(s: &Slices<'_>) -> candle_core::Result<()> {
    for_real!(s.dtype_of("x")?, R => {
        s.y::<f64>("square")?[0] = reduce::sum_of_squares::<R>(s.x("x")?);
        Ok(())
    })
}

/// Divides a gradient by the loss scale. Without a loss scale nothing is divided or checked.
fn unscale(s: &Slices<'_>, controls: &Controls<'_>) -> candle_core::Result<()> {
    let is_finite = match controls.loss_scale {
        Some(scale) => for_real!(s.dtype_of("gradient")?, R => {
            unscaling::in_place(s.y::<R>("gradient")?, 1.0 / scale)
        }),
        None => true,
    };
    s.y::<u8>("found")?[0] = is_finite.into();
    Ok(())
}

/// Returns whether the step continues, that is, whether all gradients are finite.
fn check_overflow(s: &Slices<'_>) -> Result<ControlFlow<()>> {
    let finite = s.x::<u8>("found")?;
    let first = finite.iter().position(|is_finite| *is_finite == 0);
    s.y::<u32>("first")?[0] = first.unwrap_or(finite.len()) as u32;
    Ok(match first {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    })
}

/// Returns the factor of the gradients.
fn factor(s: &Slices<'_>) -> candle_core::Result<f64> {
    let factor = s.some_x::<f64>("factor")?.map_or(1.0, |factor| factor[1]);
    Ok(factor.min(1.0))
}

/// Computes the norm and the factor that gradients are multiplied by, as `clip_grad_norm_checked` does.
fn clip_factor(
    plan: &Plan,
    parameters: &[usize],
    s: &Slices<'_>,
    controls: &Controls<'_>,
) -> Result<()> {
    let squares = s.x::<f64>("squares")?;
    let norm = squares.iter().sum::<f64>().sqrt();
    let result = s.y::<f64>("factor")?;
    result.copy_from_slice(&[norm, controls.clip_norm / (norm + 1e-6)]);
    if norm.is_finite() {
        return Ok(());
    }
    let culprit = squares.iter().position(|square| !square.is_finite());
    let culprit = culprit.and_then(|place| parameters.get(place));
    Err(not_finite(plan, culprit.copied(), norm))
}
