//! What a run leaves behind: its loss, gradients and their norm.

use super::super::plan::Operand;
use super::TrainStep;
use crate::{Error, Result};
use candle_core::Tensor;

impl TrainStep {
    /// The last run's.
    pub(super) fn loss(&mut self) -> Result<f32> {
        let loss = self.first(&self.loss.clone())?;
        Ok(loss.map_or(f32::NAN, |loss| loss as f32))
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
        let gradients = self.parameters.iter().zip(&self.gradients);
        let gradients = gradients.filter_map(|((name, var), gradient)| {
            let gradient = gradient.as_ref()?;
            let copy = self.executor.copy(&self.plan, gradient, var.shape());
            Some(copy.map(|copy| (name.clone(), copy)))
        });
        gradients.collect()
    }

    /// The first number of an operand that a run leaves, in f64.
    pub(super) fn first(&mut self, operand: &Operand) -> Result<Option<f64>> {
        let kept: Vec<f64> = self.executor.read(&self.plan, operand)?;
        Ok(kept.first().copied())
    }
}
