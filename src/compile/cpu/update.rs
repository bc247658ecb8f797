//! Calls beside those of ops: the loss and its gradient, sums of gradients, loss scaling undone, clipping, AdamW. In
//! the dtype of the parameters, f32 or f64.

use super::super::op::Op;
use super::super::plan::{Call, Plan};
use super::super::run::not_finite;
use super::Controls;
use super::memory::View;
use super::operands::Operands;
use crate::Result;
use crate::kernels::cpu::{Real, Stored, adamw, reduce, unscale as unscaling};
use candle_core::DType;
use std::ops::ControlFlow;

/// Whether the call is one of these.
pub(super) fn has(op: &Op) -> bool {
    matches!(
        op,
        Op::LossGradient { .. }
            | Op::Accumulate { .. }
            | Op::MeanLoss { .. }
            | Op::SumOfSquares { .. }
            | Op::Unscale { .. }
            | Op::CheckOverflow { .. }
            | Op::ClipFactor { .. }
            | Op::AdamW { .. }
    )
}

/// Runs one of these calls: whether the step goes on after it.
///
/// # Errors
/// Gradients that are not finite, found by clipping.
pub(super) fn run(
    plan: &Plan,
    call: &Call,
    view: &View<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    let o = Operands::<f32>::new(call, view);
    let first = call.operands().next();
    match first.map(|operand| view.dtype(operand)) {
        Some(DType::F64) => run_in::<f64>(plan, &o, controls),
        _ => run_in::<f32>(plan, &o, controls),
    }
}

fn run_in<R: Real + Stored<Wide = R>>(
    plan: &Plan,
    o: &Operands<'_, f32>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    match o.call.op {
        Op::LossGradient { counted } => {
            let scale = controls.loss_scale.unwrap_or(1.0);
            o.write::<R>("dloss")[0] = R::real(scale / counted as f64);
        }
        Op::Accumulate { accumulate, .. } => {
            let (x, y) = (o.read::<R>("x"), o.write::<R>("y"));
            match o.adds(accumulate) {
                false => y.copy_from_slice(x),
                true => reduce::add_scaled(y, x, 1.0),
            }
        }
        Op::MeanLoss {
            counted,
            accumulate,
            ..
        } => {
            let losses = o.read::<R>("losses").iter().map(|loss| loss.to_f64());
            let share = losses.sum::<f64>() / counted as f64;
            let loss = &mut o.write::<f64>("loss")[0];
            *loss = share + if o.adds(accumulate) { *loss } else { 0.0 };
        }
        Op::SumOfSquares { .. } => {
            o.write::<f64>("square")[0] = reduce::sum_of_squares(o.read::<R>("x"));
        }
        Op::Unscale { .. } => unscale::<R>(o, controls),
        Op::CheckOverflow { .. } => return Ok(check_overflow(o)),
        Op::ClipFactor { .. } => clip_factor(plan, o, controls)?,
        Op::AdamW { parameter, .. } => step::<R>(o, parameter, controls),
        _ => unreachable!("{} is an op's", o.call.op.name()),
    }
    Ok(ControlFlow::Continue(()))
}

/// A gradient over the loss scale; where there is none to undo, whatever it holds will do.
fn unscale<R: Stored>(o: &Operands<'_, f32>, controls: &Controls<'_>) {
    let is_finite = match controls.loss_scale {
        Some(scale) => unscaling::in_place(o.write::<R>("gradient"), 1.0 / scale),
        None => true,
    };
    o.write::<u8>("found")[0] = is_finite.into();
}

/// Whether the step goes on: not if a gradient has overflowed.
fn check_overflow(o: &Operands<'_, f32>) -> ControlFlow<()> {
    let finite: &[u8] = o.read("found");
    let first = finite.iter().position(|is_finite| *is_finite == 0);
    o.write::<u32>("first")[0] = first.unwrap_or(finite.len()) as u32;
    match first {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    }
}

fn step<R: Real>(o: &Operands<'_, f32>, parameter: usize, controls: &Controls<'_>) {
    let update = &controls.updates[parameter];
    let factor = match o.reads("factor") {
        true => o.read::<f64>("factor")[1],
        false => 1.0,
    };
    let gradient = o.read::<R>("gradient");
    let [p, m, v] = ["parameter", "exp_avg", "exp_avg_sq"].map(|name| o.write::<R>(name));
    match factor < 1.0 {
        true => adamw::step_scaled(p, gradient, factor, m, v, update),
        false => adamw::step(p, gradient, m, v, update),
    }
}

/// The norm, and what the gradients are multiplied by: as `clip_grad_norm_checked`.
fn clip_factor(plan: &Plan, o: &Operands<'_, f32>, controls: &Controls<'_>) -> Result<()> {
    let squares: &[f64] = o.read("squares");
    let norm = squares.iter().sum::<f64>().sqrt();
    let result: &mut [f64] = o.write("factor");
    result.copy_from_slice(&[norm, controls.clip_norm / (norm + 1e-6)]);
    if norm.is_finite() {
        return Ok(());
    }
    let culprit = squares.iter().position(|square| !square.is_finite());
    Err(not_finite(plan, culprit, norm))
}
