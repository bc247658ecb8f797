//! What a run of a plan is given, on any device, and why one ends.

use super::buffer::Location;
use super::plan::Plan;
use crate::Error;
use crate::distributed::Communicator;
use crate::kernels::Update;
use crate::optim::PlannedUpdate;
use candle_core::{Tensor, Var};

/// What may change from run to run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Controls<'a> {
    /// By parameter.
    pub updates: &'a [Update],
    /// The norm that gradients are clipped to, where the plan clips.
    pub clip_norm: f64,
    /// What the loss's gradient begins with, to be undone where the plan unscales; `None` for 1, and for no check
    /// either.
    pub loss_scale: Option<f64>,
    /// Of a loss that is a sum over targets: what makes it the step's mean.
    pub loss_divisor: Option<f64>,
    /// Of the ranks that gradients are averaged over.
    pub communicator: Option<&'a Communicator>,
}

impl Controls<'_> {
    /// The gradient of the loss.
    pub fn loss_gradient(&self) -> f64 {
        self.loss_scale.unwrap_or(1.0) / self.loss_divisor.unwrap_or(1.0)
    }
}

/// What lies outside of a plan's arena, lent for one run.
#[derive(Clone, Copy, Default)]
pub(super) struct Tensors<'a> {
    pub parameters: &'a [(String, Var)],
    /// By parameter; empty in a run without an update.
    pub updates: &'a [PlannedUpdate],
    /// What a forward alone gives out.
    pub output: Option<&'a Tensor>,
    /// What is read where it lies, by number, contiguous, inputs with all of their micro-batches; those that the run's
    /// calls do not read may be missing.
    pub arguments: &'a [Tensor],
    /// Of the ranks that gradients are averaged over, where a plan has it.
    pub communicator: Option<&'a Communicator>,
    /// [`Controls::loss_divisor`].
    pub loss_divisor: Option<f64>,
}

/// Gradients that cannot be clipped: those of parameter number `culprit`, or all together.
pub(super) fn not_finite(plan: &Plan, culprit: Option<usize>, norm: f64) -> Error {
    let buffer = culprit.and_then(|number| plan.at_location(Location::Parameter(number)));
    Error::Data {
        what: match buffer {
            Some(buffer) => format!("the gradient of parameter {}", buffer.name),
            None => "all gradients together".into(),
        },
        expected: "finite numbers".into(),
        got: format!("a norm of {norm}"),
        hint: "lower the learning rate, or skip this batch; nothing was updated".into(),
    }
}
