//! Configuration and state of the scaler, and the rule that adjusts the scale.

use crate::{Error, Result};

/// The configuration of [`GradScaler`](super::GradScaler), with PyTorch's meaning and defaults.
///
/// ```
/// use tallow::optim::{GradScaler, GradScalerConfig};
///
/// let config = GradScalerConfig { init_scale: 1024.0, growth_interval: 100, ..Default::default() };
/// assert_eq!(GradScaler::new(config)?.loss_scale(), 1024.0);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GradScalerConfig {
    /// Whether losses are scaled. A disabled scaler does not change losses and gradients, checks nothing and always
    /// steps, so that one training loop serves every precision.
    pub enabled: bool,
    /// The scale of the first step.
    pub init_scale: f64,
    /// The factor of the scale after `growth_interval` consecutive steps without overflow.
    pub growth_factor: f64,
    /// The factor of the scale after an overflow.
    pub backoff_factor: f64,
    /// The number of consecutive steps without overflow after which the scale grows.
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
    /// Checks the configuration.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `init_scale` must be a positive normal f32, `growth_factor`
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

/// The state of a scaler, with the keys of PyTorch's `GradScaler.state_dict()`; its JSON works in both directions.
///
/// ```
/// use tallow::optim::GradScalerState;
///
/// // json.dumps(torch.amp.GradScaler("cpu").state_dict())
/// let json = r#"{"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
///     "growth_interval": 2000, "_growth_tracker": 0}"#;
/// let state: GradScalerState = serde_json::from_str(json)?;
/// assert_eq!(state.growth_tracker, 0);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct GradScalerState {
    /// The scale, an f32.
    pub scale: f64,
    /// See [`GradScalerConfig::growth_factor`].
    pub growth_factor: f64,
    /// See [`GradScalerConfig::backoff_factor`].
    pub backoff_factor: f64,
    /// See [`GradScalerConfig::growth_interval`].
    pub growth_interval: usize,
    /// The number of steps without overflow since the scale last changed, below `growth_interval`.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "_growth_tracker", alias = "growth_tracker")
    )]
    pub growth_tracker: usize,
}

impl GradScalerState {
    pub(super) fn new(config: &GradScalerConfig) -> Self {
        Self {
            scale: as_f32(config.init_scale),
            growth_factor: config.growth_factor,
            backoff_factor: config.backoff_factor,
            growth_interval: config.growth_interval,
            growth_tracker: 0,
        }
    }

    /// Checks the state.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `scale` must be a positive normal f32, `growth_tracker` under
    /// `growth_interval`; the others as in [`GradScalerConfig::validate`].
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: String, got: String, hint: &str| {
            Err(Error::config("GradScalerState", field, got).must_be(expected, hint))
        };
        if !is_scale(self.scale) {
            let hint = "was it changed, or saved by a run that diverged?";
            return refuse("scale", SCALE_RANGE.into(), self.scale.to_string(), hint);
        }
        GradScalerConfig {
            enabled: true,
            init_scale: self.scale,
            growth_factor: self.growth_factor,
            backoff_factor: self.backoff_factor,
            growth_interval: self.growth_interval,
        }
        .validate()?;
        if self.growth_tracker >= self.growth_interval {
            return refuse(
                "growth_tracker",
                format!("under growth_interval, {}", self.growth_interval),
                self.growth_tracker.to_string(),
                "it goes back to 0 when it reaches the interval; was it changed?",
            );
        }
        Ok(())
    }

    /// Returns the state after a step with or without overflow.
    ///
    /// # Errors
    /// [`Error::Data`] if the scale would fall below the normal numbers of f32.
    pub(super) fn after(self, overflowed: bool) -> Result<Self> {
        if overflowed {
            return self.backed_off();
        }
        let growth_tracker = self.growth_tracker + 1;
        if growth_tracker < self.growth_interval {
            return Ok(Self {
                growth_tracker,
                ..self
            });
        }
        let grown = as_f32(self.scale * self.growth_factor);
        Ok(Self {
            scale: if grown.is_finite() { grown } else { self.scale },
            growth_tracker: 0,
            ..self
        })
    }

    fn backed_off(self) -> Result<Self> {
        let scale = as_f32(self.scale * self.backoff_factor);
        if !is_scale(scale) {
            let hint = "the run has diverged, and no scale helps: go back to a checkpoint, and lower the learning rate";
            let got = format!("none, down to a scale of {:e}", self.scale);
            let error = Error::data("GradScaler: gradients of many steps in a row", got);
            return Err(error.must_be("finite ones at some scale", hint));
        }
        Ok(Self {
            scale,
            growth_tracker: 0,
            ..self
        })
    }
}

/// Rounds a scale to f32, as PyTorch stores it; infinite if it is too large.
fn as_f32(scale: f64) -> f64 {
    f64::from(scale as f32)
}

const SCALE_RANGE: &str = "a normal number of f32, 1.2e-38 to 3.4e38";

/// Whether `scale` is a positive normal f32: below that `1 / scale` overflows.
fn is_scale(scale: f64) -> bool {
    let scale = scale as f32;
    scale.is_normal() && scale > 0.0
}
