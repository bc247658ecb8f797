//! The update at the end of a measured training step.

use super::row::LossScaling;
use crate::Result;
use crate::optim::{GradScaler, GradScalerConfig, Optimizer, Rule, usual_groups};
use crate::precision::Precision;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

/// Optimizer and loss scale of a measured run.
pub(super) struct Update {
    pub optimizer: Optimizer,
    /// The gradient scaler; disabled if the dtype has the range of f32.
    pub scaler: GradScaler,
    scales: bool,
    skipped_steps: usize,
}

impl Update {
    pub fn new(rule: Rule, parameters: Vec<(String, Var)>, precision: Precision) -> Result<Self> {
        let scales = precision.dtype() == DType::F16;
        Ok(Self {
            optimizer: Optimizer::with_groups(usual_groups(parameters, rule))?,
            scaler: GradScaler::new(GradScalerConfig {
                enabled: scales,
                ..Default::default()
            })?,
            scales,
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
