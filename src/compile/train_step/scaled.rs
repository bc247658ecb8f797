//! Steps with a loss scale.

use super::super::op::Op;
use super::{OP, TrainStep};
use crate::optim::{AdamW, GradScaler};
use crate::{Error, Result};
use candle_core::Tensor;

/// What a step with a loss scale has come to.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledStep {
    /// The mean loss of the batch, not scaled.
    pub loss: f32,
    /// The first parameter whose gradient was infinite or NaN, for which the update was left out; `None` if it was done.
    pub non_finite: Option<String>,
}

impl ScaledStep {
    /// Whether there was an update.
    pub fn stepped(&self) -> bool {
        self.non_finite.is_none()
    }
}

impl TrainStep {
    /// As [`run`](Self::run) with the scaler's loss scale, which is read here: what [`GradScaler::scale`],
    /// [`unscale`](GradScaler::unscale), [`step`](GradScaler::step) and [`update`](GradScaler::update) do in an eager step.
    /// Where a gradient has overflowed, parameters and optimizer stay what they were, and the scale becomes smaller.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{PlanConfig, TrainStep};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamW, AdamWConfig, GradScaler, GradScalerConfig};
    /// use tallow::precision::Precision;
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
    /// let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    /// let plan = PlanConfig {
    ///     batch_size: 1, sequence_length: 4, precision: Precision::F16, loss_scaling: true,
    ///     ..Default::default()
    /// };
    /// let mut step = TrainStep::new(&model, &optimizer, &plan)?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let done = step.run_scaled(&mut optimizer, &mut scaler, &tokens, &tokens)?;
    /// assert!(done.loss.is_finite());
    /// assert_eq!(optimizer.steps(), usize::from(done.stepped()));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run), but for gradients that are not finite; [`Error::Config`] if the step was planned without loss
    /// scaling (and the scaler is not switched off); [`Error::Order`] if an eager step of the scaler was begun and not ended;
    /// as [`GradScaler::update`].
    pub fn run_scaled(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        tokens: &Tensor,
        targets: &Tensor,
    ) -> Result<ScaledStep> {
        let loss_scale = scaler.planned_scale(OP)?;
        if loss_scale.is_some() && !self.config.loss_scaling {
            return Err(Error::Config {
                config: "PlanConfig",
                field: "loss_scaling",
                expected: "true, for a step whose loss is to be scaled".into(),
                got: "false".into(),
                hint: "plan with loss_scaling: true, or call run".into(),
            });
        }
        let stepped = self.run_with(optimizer, tokens, targets, loss_scale)?;
        let non_finite = if stepped {
            None
        } else {
            self.first_non_finite()?
        };
        scaler.planned_update(!stepped)?;
        Ok(ScaledStep {
            loss: self.loss()?,
            non_finite,
        })
    }

    /// The parameter that the check for overflow has named.
    fn first_non_finite(&mut self) -> Result<Option<String>> {
        let is_check = |op: &Op| matches!(op, Op::CheckOverflow { .. });
        let Some(call) = self.plan.calls().iter().find(|call| is_check(&call.op)) else {
            return Ok(None);
        };
        let first: Vec<u32> = self.executor.read(&self.plan, &call.writes[0])?;
        let named = first
            .first()
            .and_then(|first| self.parameters.get(*first as usize));
        Ok(named.map(|(name, _)| name.clone()))
    }
}
