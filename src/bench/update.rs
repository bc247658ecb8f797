//! The update at the end of a measured training step.

use super::row::LossScaling;
use crate::Result;
use crate::compile::StepConfig;
use crate::optim::{GradScaler, GradScalerConfig, Optimizer, usual_groups};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

/// Optimizer and loss scale of a measured run.
pub(super) struct Update {
    pub optimizer: Optimizer,
    /// The gradient scaler; disabled unless the step scales its loss.
    pub scaler: GradScaler,
    scales: bool,
    skipped_steps: usize,
}

impl Update {
    pub fn new(config: &StepConfig, parameters: Vec<(String, Var)>) -> Result<Self> {
        Ok(Self {
            optimizer: Optimizer::with_groups(usual_groups(parameters, config.optimizer))?,
            scaler: GradScaler::new(GradScalerConfig {
                enabled: config.loss_scaling,
                ..Default::default()
            })?,
            scales: config.loss_scaling,
            skipped_steps: 0,
        })
    }

    /// Returns the loss that backward starts from: scaled if the scaler is enabled.
    pub fn scaled(&self, loss: Tensor) -> Result<Tensor> {
        self.scaler.scale(&loss)
    }

    /// Unscales and checks the gradients, and updates parameters and scale.
    pub fn step(&mut self, gradients: &mut GradStore) -> Result<()> {
        let stepped = self.scaler.step(&mut self.optimizer, gradients)?;
        self.count(stepped);
        self.scaler.update()
    }

    /// Counts the step as skipped unless it made an update.
    pub fn count(&mut self, stepped: bool) {
        self.skipped_steps += usize::from(!stepped);
    }

    /// Returns the loss scale and the skipped steps; `None` if the loss is not scaled.
    pub fn loss_scaling(&self) -> Option<LossScaling> {
        self.scales.then(|| LossScaling {
            loss_scale: self.scaler.loss_scale(),
            skipped_steps: self.skipped_steps,
        })
    }
}
