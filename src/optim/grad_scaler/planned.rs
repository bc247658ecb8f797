//! What a planned step needs of the scaler: its scale, and to be told how the step ended.

use super::GradScaler;
use crate::{Error, Result};

impl GradScaler {
    /// The scale of the next step; `None` for a scaler that is switched off.
    ///
    /// # Errors
    /// [`Error::Order`] if gradients were unscaled or stepped since the last update.
    pub(crate) fn planned_scale(&self, op: &'static str) -> Result<Option<f64>> {
        if !self.unscaled.is_empty() {
            return Err(Error::Order {
                op,
                problem: "the scaler has unscaled gradients of another step".into(),
                hint: "call update at the end of every eager step".into(),
            });
        }
        Ok(self.enabled.then_some(self.state.scale))
    }

    /// Ends a planned step: moves the scale by the rule.
    ///
    /// # Errors
    /// As [`GradScaler::update`].
    pub(crate) fn planned_update(&mut self, overflowed: bool) -> Result<()> {
        if self.enabled {
            self.state = self.state.after(overflowed)?;
        }
        Ok(())
    }
}
