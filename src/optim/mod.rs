//! Optimization: an [`Optimizer`] with a [`Rule`] for each group of parameters, gradient clipping and accumulation,
//! loss scaling, learning-rate schedules.
//!
//! All of it works on candle's [`Var`](candle_core::Var)s and [`GradStore`]s, of any model. Parameters are
//! `(name, Var)` pairs, so that errors name the parameter. [`train`](crate::train) has a training loop.
//!
//! ```
//! use candle_core::{DType, Device, Var};
//! use tallow::optim::{AdamWConfig, Optimizer, Schedule, clip_grad_norm};
//!
//! let weight = Var::from_slice(&[0.5f32, -1.0, 2.0], 3, &Device::Cpu)?;
//! let parameters = vec![("weight".to_string(), weight.clone())];
//! let schedule = Schedule::WarmupCosine {
//!     max_lr: 0.1,
//!     min_lr: 0.0,
//!     warmup_steps: 2,
//!     total_steps: 10,
//! };
//! let mut optimizer = Optimizer::new(parameters.clone(), AdamWConfig::default())?;
//! for step in 0..10 {
//!     optimizer.set_learning_rate(schedule.learning_rate(step));
//!     let loss = weight.sqr()?.sum_all()?;
//!     let mut gradients = tallow::backward(loss)?;
//!     clip_grad_norm(&mut gradients, &parameters, 1.0)?;
//!     optimizer.step(&gradients)?;
//! }
//! assert!(weight.sqr()?.sum_all()?.to_scalar::<f32>()? < 5.25);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! [`GradStore`]: candle_core::backprop::GradStore

mod accumulate;
mod clip;
pub(crate) mod cost;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "files")]
mod file;
mod grad_scaler;
mod groups;
pub(crate) mod muon;
mod optimizer;
pub(crate) mod rules;
mod schedule;
mod shards;
mod slot;
mod state;

#[cfg(feature = "cuda")]
pub(crate) use cuda::orthogonalize_on_gpu;
pub(crate) use optimizer::{OptimizerVersion, PlannedUpdate};
pub(crate) use slot::{direction, orthogonalize, step_slices};

pub use crate::gradients::MissingGradients;
pub use accumulate::GradientAccumulator;
#[cfg(feature = "train")]
pub(crate) use clip::{DIVERGED, finite_loss};
pub use clip::{check_finite, clip_grad_norm, clip_grad_norm_checked, clip_grad_value, grad_norm};
pub use grad_scaler::{GradScaler, GradScalerConfig, GradScalerState};
pub use groups::{ParameterGroup, decay_matrices_only, parameters_of, usual_groups};
pub use optimizer::Optimizer;
pub use rules::{
    AdamWConfig, IterationDType, LionConfig, Moments, MuonConfig, Rule, Scaling, SgdConfig,
    is_hidden_matrix, muon_for_matrices,
};
pub use schedule::Schedule;
