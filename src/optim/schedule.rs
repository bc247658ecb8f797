//! Learning-rate schedules.

use super::config::at_least_zero;
use crate::{Error, Result};
use std::fmt;

/// A learning-rate schedule. Steps are counted from 0.
///
/// It is plain data: a checkpoint that has it and the step can be resumed.
///
/// ```
/// use tallow::optim::Schedule;
///
/// let schedule = Schedule::WarmupCosine { max_lr: 1.0, min_lr: 0.1, warmup_steps: 10, total_steps: 110 };
/// assert_eq!(schedule.learning_rate(0), 0.0);
/// assert_eq!(schedule.learning_rate(5), 0.5);
/// assert_eq!(schedule.learning_rate(10), 1.0);
/// assert!((schedule.learning_rate(60) - 0.55).abs() < 1e-12); // half way down
/// assert_eq!(schedule.learning_rate(110), 0.1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)
)]
#[non_exhaustive]
pub enum Schedule {
    /// A constant learning rate.
    Constant {
        /// The learning rate.
        lr: f64,
    },
    /// A linear warm-up from 0 to `max_lr`, then half a cosine down to `min_lr`, then `min_lr`:
    ///
    /// ```text
    /// t < warmup_steps   max_lr * t / warmup_steps
    /// t < total_steps    min_lr + (max_lr - min_lr) (1 + cos(pi u)) / 2,
    ///                    u = (t - warmup_steps) / (total_steps - warmup_steps)
    /// otherwise          min_lr
    /// ```
    WarmupCosine {
        /// The highest learning rate, reached at step `warmup_steps`.
        max_lr: f64,
        /// The final learning rate, from step `total_steps` on.
        min_lr: f64,
        /// The number of warm-up steps; 0 for none.
        warmup_steps: usize,
        /// The step at which `min_lr` is reached, including the warm-up.
        total_steps: usize,
    },
    /// A linear warm-up from 0 to `max_lr`, then linearly down to `min_lr`, then `min_lr`.
    WarmupLinear {
        /// The highest learning rate, reached at step `warmup_steps`.
        max_lr: f64,
        /// The final learning rate, from step `total_steps` on.
        min_lr: f64,
        /// The number of warm-up steps; 0 for none.
        warmup_steps: usize,
        /// The step at which `min_lr` is reached, including the warm-up.
        total_steps: usize,
    },
}

/// Describes the schedule: `constant 0.001`, `up to 0.001 in 10 steps, down to 0.0001 at step 100 along a cosine`.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A tenth of 0.003 is 0.00030000000000000003.
        let short = |lr: f64| format!("{lr:.5e}").parse().unwrap_or(lr);
        let ([max_lr, min_lr], [warmup_steps, total_steps]) = self.ramp();
        let (max_lr, min_lr) = (short(max_lr), short(min_lr));
        let curve = match self {
            Self::Constant { .. } => return write!(f, "constant {max_lr}"),
            Self::WarmupCosine { .. } => "along a cosine",
            Self::WarmupLinear { .. } => "in a straight line",
        };
        match warmup_steps {
            0 => write!(f, "from {max_lr}")?,
            _ => write!(f, "up to {max_lr} in {warmup_steps} steps")?,
        }
        write!(f, ", down to {min_lr} at step {total_steps} {curve}")
    }
}

impl Schedule {
    /// Returns the highest and the lowest rate, and the steps of the warm-up and in total.
    fn ramp(&self) -> ([f64; 2], [usize; 2]) {
        match *self {
            Self::Constant { lr } => ([lr, lr], [0, 0]),
            Self::WarmupCosine {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            }
            | Self::WarmupLinear {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            } => ([max_lr, min_lr], [warmup_steps, total_steps]),
        }
    }

    pub(crate) fn highest(&self) -> f64 {
        self.ramp().0[0]
    }

    /// Returns the learning rate of step `step`, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        let ([max_lr, min_lr], [warmup_steps, total_steps]) = self.ramp();
        if step < warmup_steps {
            return max_lr * (step as f64 / warmup_steps as f64);
        }
        if step >= total_steps {
            return min_lr;
        }
        let progress = (step - warmup_steps) as f64 / (total_steps - warmup_steps) as f64;
        let left = match self {
            Self::WarmupLinear { .. } => 1.0 - progress,
            _ => (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0,
        };
        min_lr + (max_lr - min_lr) * left
    }

    /// Checks the schedule.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: rates must be at least 0 and finite in f32, `min_lr` at most `max_lr`,
    /// `total_steps` at least 1, `warmup_steps` at most `total_steps`.
    pub fn validate(&self) -> Result<()> {
        if let Self::Constant { lr } = *self {
            return at_least_zero("Schedule", "lr", lr);
        }
        let ([max_lr, min_lr], [warmup_steps, total_steps]) = self.ramp();
        at_least_zero("Schedule", "max_lr", max_lr)?;
        at_least_zero("Schedule", "min_lr", min_lr)?;
        if min_lr > max_lr {
            return Err(Error::config("Schedule", "min_lr", min_lr).must_be(
                format!("at most max_lr, {max_lr}"),
                "lower min_lr or raise max_lr",
            ));
        }
        if total_steps == 0 {
            return Err(Error::config("Schedule", "total_steps", total_steps).must_be(
                "at least 1",
                "it is the step at which min_lr is reached; for one rate at every step take Schedule::Constant",
            ));
        }
        if warmup_steps > total_steps {
            let got = Error::config("Schedule", "warmup_steps", warmup_steps);
            return Err(got.must_be(
                format!("at most total_steps, {total_steps}"),
                "total_steps counts the warm-up in",
            ));
        }
        Ok(())
    }
}
