//! What a scaler is told.

use crate::{Error, Result};

/// How the loss scale starts and moves, with PyTorch's meaning and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GradScalerConfig {
    /// Whether anything is scaled. A scaler that is switched off hands losses and gradients on as they are, checks
    /// nothing and always steps: one training loop serves every precision.
    pub enabled: bool,
    /// The scale of the first step.
    pub init_scale: f64,
    /// What the scale is multiplied by after `growth_interval` steps in a row without overflow.
    pub growth_factor: f64,
    /// What the scale is multiplied by after a step that overflowed.
    pub backoff_factor: f64,
    /// How many steps in a row without overflow it takes to try a larger scale.
    pub growth_interval: usize,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }
}

impl GradScalerConfig {
    /// Whether a scaler can work with these numbers.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `init_scale` must be a normal number of `f32` and over 0, `growth_factor`
    /// finite and over 1, `backoff_factor` over 0 and under 1, `growth_interval` at least 1.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::config("GradScalerConfig", field, got).must_be(expected, hint))
        };
        if !is_scale(self.init_scale) {
            return refuse(
                "init_scale",
                SCALE_RANGE,
                self.init_scale.to_string(),
                "65536 is usual",
            );
        }
        if !(self.growth_factor.is_finite() && self.growth_factor > 1.0) {
            return refuse(
                "growth_factor",
                "finite and over 1",
                self.growth_factor.to_string(),
                "2 is usual; a large growth_interval keeps the scale where it is",
            );
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return refuse(
                "backoff_factor",
                "over 0 and under 1",
                self.backoff_factor.to_string(),
                "0.5 is usual",
            );
        }
        if self.growth_interval == 0 {
            return refuse("growth_interval", "at least 1", "0".into(), "2000 is usual");
        }
        Ok(())
    }
}

/// The scales there are, in words.
pub(super) const SCALE_RANGE: &str = "a normal number of f32, 1.2e-38 to 3.4e38";

/// Whether `scale` can be one. As in PyTorch a scale is an `f32`; under its normal numbers `1 / scale` is no `f32`.
pub(super) fn is_scale(scale: f64) -> bool {
    let scale = scale as f32;
    scale.is_normal() && scale > 0.0
}
