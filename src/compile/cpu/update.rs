//! Calls that come when the gradients are there: loss scaling undone, clipping, AdamW.

use super::super::plan::Plan;
use super::super::run::not_finite;
use super::Controls;
use super::operands::Operands;
use crate::Result;
use crate::kernels::cpu::{Stored, adamw, unscale as unscaling};
use std::ops::ControlFlow;

/// A gradient over the loss scale; where there is none to undo, whatever it holds will do.
pub(super) fn unscale<S: Stored<Wide = f32>>(o: &Operands<'_, S>, controls: &Controls<'_>) {
    let is_finite = match controls.loss_scale {
        Some(scale) => unscaling::in_place(o.y(0), 1.0 / scale),
        None => true,
    };
    o.write::<u8>(1)[0] = is_finite.into();
}

/// Whether the step goes on: not if a gradient has overflowed.
pub(super) fn check_overflow<S: Stored<Wide = f32>>(o: &Operands<'_, S>) -> ControlFlow<()> {
    let finite: &[u8] = o.read(0);
    let first = finite.iter().position(|is_finite| *is_finite == 0);
    o.write::<u32>(0)[0] = first.unwrap_or(finite.len()) as u32;
    match first {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    }
}

pub(super) fn step<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    parameter: usize,
    controls: &Controls<'_>,
) {
    let update = &controls.updates[parameter];
    let factor = match o.call.reads.len() {
        1 => 1.0,
        _ => o.read::<f64>(1)[1],
    };
    let (p, g, m, v) = (o.y(0), o.x(0), o.y(1), o.y(2));
    match factor < 1.0 {
        true => adamw::step_scaled(p, g, factor, m, v, update),
        false => adamw::step(p, g, m, v, update),
    }
}

/// The norm, and what the gradients are multiplied by: as `clip_grad_norm_checked`.
pub(super) fn clip_factor<S: Stored<Wide = f32>>(
    plan: &Plan,
    o: &Operands<'_, S>,
    controls: &Controls<'_>,
) -> Result<()> {
    let squares: &[f64] = o.read(0);
    let norm = squares.iter().sum::<f64>().sqrt();
    let result: &mut [f64] = o.write(0);
    result.copy_from_slice(&[norm, controls.clip_norm / (norm + 1e-6)]);
    if norm.is_finite() {
        return Ok(());
    }
    let culprit = squares.iter().position(|square| !square.is_finite());
    Err(not_finite(plan, culprit, norm))
}
