//! Learning-rate schedules.

use super::rules::at_least_zero;
use crate::{Error, Result};
use std::fmt;

/// A learning-rate schedule. Steps are counted from 0.
///
/// It is plain data: a checkpoint that has it and the step can be resumed.
///
/// ```
/// use tallow::optim::Schedule;
///
/// let schedule = Schedule::WarmupCosine {
///     max_lr: 1.0,
///     min_lr: 0.1,
///     warmup_steps: 10,
///     total_steps: 110,
/// };
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
    /// A linear warm-up from 0 to `max_lr`, then `max_lr`, then linearly down to `min_lr` in the last `decay_steps`,
    /// then `min_lr` (WSD: warm-up, stable, decay):
    ///
    /// ```text
    /// t < warmup_steps                 max_lr * t / warmup_steps
    /// t < total_steps - decay_steps    max_lr
    /// t < total_steps                  min_lr + (max_lr - min_lr) (total_steps - t) / decay_steps
    /// otherwise                        min_lr
    /// ```
    ///
    /// Unlike a cosine, a run can be continued from before the decay without knowing its length in advance. Hu et al.,
    /// "MiniCPM", 2024, section 4.
    WarmupStableDecay {
        /// The highest learning rate, from step `warmup_steps` on.
        max_lr: f64,
        /// The final learning rate, from step `total_steps` on.
        min_lr: f64,
        /// The number of warm-up steps; 0 for none.
        warmup_steps: usize,
        /// The number of steps of the decay.
        decay_steps: usize,
        /// The step at which `min_lr` is reached, including warm-up and decay.
        total_steps: usize,
    },
    /// Half a cosine from `max_lr` down to `min_lr` again and again, as PyTorch's `CosineAnnealingWarmRestarts`. The
    /// first has `period` steps, and each has `factor` times as many as the one before:
    ///
    /// ```text
    /// min_lr + (max_lr - min_lr) (1 + cos(pi u / n)) / 2, at step u of a period of n
    /// ```
    ///
    /// Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, equation 5.
    CosineRestarts {
        /// The learning rate at the beginning of each period.
        max_lr: f64,
        /// The learning rate that the end of a period approaches.
        min_lr: f64,
        /// The number of steps of the first period (PyTorch's `T_0`).
        period: usize,
        /// The growth of the period with each restart (PyTorch's `T_mult`); 1 for none.
        factor: usize,
    },
    /// From `lr * start_factor` in a straight line to `lr * end_factor`, then constant, as PyTorch's `LinearLR`:
    ///
    /// ```text
    /// lr (start_factor + (end_factor - start_factor) min(t, steps) / steps)
    /// ```
    Linear {
        /// The learning rate that the factors multiply.
        lr: f64,
        /// The factor of step 0.
        start_factor: f64,
        /// The factor from step `steps` on.
        end_factor: f64,
        /// The number of steps from one factor to the other.
        steps: usize,
    },
}

/// Describes the schedule: `constant 0.001`, `up to 0.001 in 10 steps, down to 0.0001 at step 100 along a cosine`.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A tenth of 0.003 is 0.00030000000000000003.
        let short = |lr: f64| -> f64 { format!("{lr:.5e}").parse().unwrap_or(lr) };
        let rise = |max_lr: f64, warmup_steps: usize| match warmup_steps {
            0 => format!("from {}", short(max_lr)),
            _ => format!("up to {} in {warmup_steps} steps", short(max_lr)),
        };
        match *self {
            Self::Constant { lr } => write!(f, "constant {}", short(lr)),
            Self::WarmupCosine {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            } => {
                let (rise, min_lr) = (rise(max_lr, warmup_steps), short(min_lr));
                write!(
                    f,
                    "{rise}, down to {min_lr} at step {total_steps} along a cosine"
                )
            }
            Self::WarmupLinear {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            } => {
                let (rise, min_lr) = (rise(max_lr, warmup_steps), short(min_lr));
                write!(
                    f,
                    "{rise}, down to {min_lr} at step {total_steps} in a straight line"
                )
            }
            Self::WarmupStableDecay {
                max_lr,
                min_lr,
                warmup_steps,
                decay_steps,
                total_steps,
            } => {
                let (rise, min_lr) = (rise(max_lr, warmup_steps), short(min_lr));
                write!(
                    f,
                    "{rise}, down to {min_lr} in the last {decay_steps} of {total_steps} steps"
                )
            }
            Self::CosineRestarts {
                max_lr,
                min_lr,
                period,
                factor,
            } => {
                let (max_lr, min_lr) = (short(max_lr), short(min_lr));
                write!(
                    f,
                    "from {max_lr} down to {min_lr} along a cosine of {period} steps, restarted"
                )?;
                match factor {
                    1 => Ok(()),
                    _ => write!(f, " {factor} times as long"),
                }
            }
            Self::Linear {
                lr,
                start_factor,
                end_factor,
                steps,
            } => {
                let [from, to] = [start_factor, end_factor].map(|factor| short(lr * factor));
                write!(f, "from {from} to {to} in {steps} steps")
            }
        }
    }
}

impl Schedule {
    /// Returns the highest learning rate.
    pub(crate) fn highest(&self) -> f64 {
        match *self {
            Self::Constant { lr } => lr,
            Self::WarmupCosine { max_lr, .. }
            | Self::WarmupLinear { max_lr, .. }
            | Self::WarmupStableDecay { max_lr, .. }
            | Self::CosineRestarts { max_lr, .. } => max_lr,
            Self::Linear {
                lr,
                start_factor,
                end_factor,
                ..
            } => lr * start_factor.max(end_factor),
        }
    }

    /// Returns the learning rate of step `step`, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        let between = |min_lr: f64, max_lr: f64, left: f64| min_lr + (max_lr - min_lr) * left;
        let part = |steps: usize, of: usize| steps as f64 / of as f64;
        match *self {
            Self::Constant { lr } => lr,
            Self::WarmupCosine {
                max_lr,
                warmup_steps,
                ..
            }
            | Self::WarmupLinear {
                max_lr,
                warmup_steps,
                ..
            }
            | Self::WarmupStableDecay {
                max_lr,
                warmup_steps,
                ..
            } if step < warmup_steps => max_lr * part(step, warmup_steps),
            Self::WarmupCosine {
                min_lr,
                total_steps,
                ..
            }
            | Self::WarmupLinear {
                min_lr,
                total_steps,
                ..
            }
            | Self::WarmupStableDecay {
                min_lr,
                total_steps,
                ..
            } if step >= total_steps => min_lr,
            Self::WarmupCosine {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            } => {
                let progress = part(step - warmup_steps, total_steps - warmup_steps);
                between(min_lr, max_lr, half_cosine(progress))
            }
            Self::WarmupLinear {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            } => {
                let progress = part(step - warmup_steps, total_steps - warmup_steps);
                between(min_lr, max_lr, 1.0 - progress)
            }
            Self::WarmupStableDecay {
                max_lr,
                min_lr,
                decay_steps,
                total_steps,
                ..
            } => match total_steps - step {
                left if left < decay_steps => between(min_lr, max_lr, part(left, decay_steps)),
                _ => max_lr,
            },
            Self::CosineRestarts {
                max_lr,
                min_lr,
                period,
                factor,
            } => {
                let (mut at, mut period) = (step, period.max(1));
                match factor {
                    0 | 1 => at %= period,
                    _ => {
                        while at >= period {
                            at -= period;
                            period = period.saturating_mul(factor);
                        }
                    }
                }
                between(min_lr, max_lr, half_cosine(part(at, period)))
            }
            Self::Linear {
                lr,
                start_factor,
                end_factor,
                steps,
            } => {
                let progress = part(step.min(steps), steps);
                lr * between(start_factor, end_factor, progress)
            }
        }
    }

    /// Checks the schedule.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: rates and factors must be at least 0 and finite in f32, `min_lr` at most
    /// `max_lr`, `total_steps`, `period`, `factor` and `steps` at least 1, `warmup_steps` and `decay_steps` together at
    /// most `total_steps`.
    pub fn validate(&self) -> Result<()> {
        let rates: &[(&'static str, f64)] = match *self {
            Self::Constant { lr } => &[("lr", lr)],
            Self::WarmupCosine { max_lr, min_lr, .. }
            | Self::WarmupLinear { max_lr, min_lr, .. }
            | Self::WarmupStableDecay { max_lr, min_lr, .. }
            | Self::CosineRestarts { max_lr, min_lr, .. } => {
                &[("max_lr", max_lr), ("min_lr", min_lr)]
            }
            Self::Linear {
                lr,
                start_factor,
                end_factor,
                ..
            } => &[
                ("lr", lr),
                ("start_factor", start_factor),
                ("end_factor", end_factor),
            ],
        };
        for (field, rate) in rates {
            at_least_zero("Schedule", field, *rate)?;
        }
        if let [("max_lr", max_lr), ("min_lr", min_lr)] = rates
            && min_lr > max_lr
        {
            return Err(Error::config("Schedule", "min_lr", min_lr).must_be(
                format!("at most max_lr, {max_lr}"),
                "lower min_lr or raise max_lr",
            ));
        }
        at_least_zero("Schedule", "lr", self.highest())?; // the product with a factor
        let (counts, warmup_steps): (&[_], _) = match *self {
            Self::Constant { .. } => (&[], None),
            Self::WarmupCosine {
                warmup_steps,
                total_steps,
                ..
            }
            | Self::WarmupLinear {
                warmup_steps,
                total_steps,
                ..
            } => (
                &[("total_steps", total_steps)],
                Some((warmup_steps, 0, total_steps)),
            ),
            Self::WarmupStableDecay {
                warmup_steps,
                decay_steps,
                total_steps,
                ..
            } => (
                &[("total_steps", total_steps)],
                Some((warmup_steps, decay_steps, total_steps)),
            ),
            Self::CosineRestarts { period, factor, .. } => {
                (&[("period", period), ("factor", factor)], None)
            }
            Self::Linear { steps, .. } => (&[("steps", steps)], None),
        };
        for (field, count) in counts {
            if *count == 0 {
                let hint = match *field {
                    "total_steps" => {
                        "it is the step at which min_lr is reached; for one rate at every step take Schedule::Constant"
                    }
                    "factor" => "1 keeps the length of the periods",
                    _ => "for one rate at every step take Schedule::Constant",
                };
                return Err(Error::config("Schedule", field, count).must_be("at least 1", hint));
            }
        }
        match warmup_steps {
            Some((warmup_steps, _, total_steps)) if warmup_steps > total_steps => {
                let got = Error::config("Schedule", "warmup_steps", warmup_steps);
                Err(got.must_be(
                    format!("at most total_steps, {total_steps}"),
                    "total_steps counts the warm-up in",
                ))
            }
            Some((warmup_steps, decay_steps, total_steps))
                if decay_steps > total_steps - warmup_steps =>
            {
                let got = Error::config("Schedule", "decay_steps", decay_steps);
                Err(got.must_be(
                    format!(
                        "at most total_steps - warmup_steps, {}",
                        total_steps - warmup_steps
                    ),
                    "total_steps counts warm-up and decay in",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the height of half a cosine from 1 down to 0.
fn half_cosine(progress: f64) -> f64 {
    (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0
}
