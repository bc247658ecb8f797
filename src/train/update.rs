//! From gradients to the next weights: unscaled, clipped, and applied unless they overflowed.

use super::Trainer;
use super::ranks::Job;
use crate::optim::guard::DIVERGED;
use crate::optim::{GradScaler, check_norm, clip_grad_norm};
use crate::{Error, Result, probe};
use candle_core::backprop::GradStore;

/// f16's smallest normal number, 2^-14. Under it the scale alone would round gradients away, so a run that overflows
/// even here has diverged. (Not 1: a sum over many tokens may want less.)
const SMALLEST_SCALE: f64 = 1.0 / 16384.0;

/// What became of a step's gradients.
pub(super) struct Update {
    pub(super) grad_norm: f64,
    pub(super) skipped: bool,
    /// What the loss was multiplied by.
    pub(super) loss_scale: Option<f64>,
}

/// An error where a gradient has overflowed at a scale that will not become smaller.
pub(super) fn refuse_if_hopeless(
    loss_scale: f64,
    parameter: Option<&str>,
    step: usize,
) -> Result<()> {
    if loss_scale > SMALLEST_SCALE {
        return Ok(());
    }
    Err(Error::Data {
        what: match parameter {
            Some(parameter) => format!("the gradient of parameter {parameter} in step {step}"),
            None => format!("a gradient of another rank's shard in step {step}"),
        },
        expected: "finite numbers at some loss scale".into(),
        got: format!("infinity or NaN, down to a scale of {loss_scale:e}"),
        hint: DIVERGED.into(),
    })
}

impl Trainer {
    /// The update of one step. After an error weights, optimizer and scale are what they were.
    pub(super) fn update(&mut self, gradients: GradStore, learning_rate: f64) -> Result<Update> {
        let _range = probe::phase("optimizer");
        let max_norm = self.config.max_grad_norm.unwrap_or(f64::INFINITY);
        match self.scaler.clone() {
            None => self.guarded_update(gradients, max_norm, learning_rate),
            Some(mut scaler) => {
                let update = self.scaled_update(&mut scaler, gradients, max_norm, learning_rate)?;
                self.scaler = Some(scaler);
                Ok(update)
            }
        }
    }

    /// Without a scale: gradients that are not finite are an error.
    fn guarded_update(
        &mut self,
        mut gradients: GradStore,
        max_norm: f64,
        learning_rate: f64,
    ) -> Result<Update> {
        let grad_norm = self.clip(&mut gradients, max_norm)?;
        check_norm(grad_norm, &gradients, &self.parameters)?;
        self.optimizer.set_learning_rate(learning_rate);
        self.optimizer.step(&gradients)?;
        Ok(Update {
            grad_norm,
            skipped: false,
            loss_scale: None,
        })
    }

    fn clip(&self, gradients: &mut GradStore, max_norm: f64) -> Result<f64> {
        match &self.job {
            Some(Job::FullyShard(sharded)) => sharded.clip_grad_norm(gradients, max_norm),
            _ => clip_grad_norm(gradients, &self.parameters, max_norm),
        }
    }

    /// With a scale: gradients that are not finite skip the update, and the scale backs off.
    fn scaled_update(
        &mut self,
        scaler: &mut GradScaler,
        mut gradients: GradStore,
        max_norm: f64,
        learning_rate: f64,
    ) -> Result<Update> {
        let loss_scale = scaler.loss_scale();
        scaler.unscale(&mut gradients, &self.parameters)?;
        if let Some(Job::FullyShard(sharded)) = &self.job {
            scaler.agree(sharded.communicator())?;
        }
        let grad_norm = self.clip(&mut gradients, max_norm)?;
        self.optimizer.set_learning_rate(learning_rate);
        let stepped = scaler.step(&mut self.optimizer, &mut gradients)?;
        if !stepped {
            refuse_if_hopeless(loss_scale, scaler.non_finite(), self.step + 1)?;
        }
        scaler.update()?;
        Ok(Update {
            grad_norm,
            skipped: !stepped,
            loss_scale: Some(loss_scale),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An overflow that only another rank has seen names no parameter here.
    #[test]
    fn hopeless_steps_name_the_parameter_or_the_other_rank() {
        let text = |parameter| {
            let refused = refuse_if_hopeless(SMALLEST_SCALE, parameter, 3);
            refused.map_or_else(|error| error.to_string(), |()| String::new())
        };
        let named = text(Some("ln.weight"));
        assert!(
            named.starts_with("the gradient of parameter ln.weight in step 3: expected finite"),
            "{named}"
        );
        let other = text(None);
        assert!(
            other.starts_with("a gradient of another rank's shard in step 3: expected finite"),
            "{other}"
        );
        assert!(refuse_if_hopeless(2.0 * SMALLEST_SCALE, None, 3).is_ok());
    }
}
