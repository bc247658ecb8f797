//! What a run leaves behind: its loss, gradients and their norm.

use super::super::op::Op;
use super::TrainStep;
use crate::{Error, Result};
use candle_core::Tensor;

impl TrainStep {
    /// The last run's.
    pub(super) fn loss(&mut self) -> Result<f32> {
        let loss = self.kept(|op| matches!(op, Op::MeanLoss { .. }))?;
        Ok(loss.map_or(f32::NAN, |loss| loss as f32)) // every plan of a step has one
    }

    /// The norm of the last run's gradients before clipping; `None` before the first run, and without clipping.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.norm
    }

    /// Copies of the last run's gradients by name, not clipped.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and where the optimizer runs in backward, which frees them.
    pub fn gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        let refuse = |problem: &str, hint: &str| {
            Err(Error::Order {
                op: "compile::TrainStep::gradients",
                problem: problem.into(),
                hint: hint.into(),
            })
        };
        if !self.has_run {
            return refuse("no step has been run", "call run first");
        }
        if self.config.optimizer_in_backward {
            let hint = "plan with optimizer_in_backward: false to read them";
            return refuse("each gradient was freed in backward", hint);
        }
        let updates = self.plan.calls().iter().filter_map(|call| match call.op {
            Op::AdamW { parameter, .. } => Some((parameter, call.reads[0].clone())),
            _ => None,
        });
        let updates: Vec<_> = updates.collect();
        let gradients = updates.into_iter().map(|(number, gradient)| {
            let (name, var) = &self.parameters[number];
            let values: Vec<f32> = self.executor.read(&self.plan, &gradient)?;
            Ok((
                name.clone(),
                Tensor::from_vec(values, var.shape(), var.device())?,
            ))
        });
        gradients.collect()
    }

    /// The first number of what the last call of this kind has written, a buffer of f64.
    pub(super) fn kept(&mut self, is: impl Fn(&Op) -> bool) -> Result<Option<f64>> {
        let Some(call) = self.plan.calls().iter().rev().find(|call| is(&call.op)) else {
            return Ok(None);
        };
        let kept: Vec<f64> = self.executor.read(&self.plan, &call.writes[0])?;
        Ok(kept.first().copied())
    }
}
