//! The training loop: steps, evaluation, and checkpoints from which a run resumes.
//!
//! [`Trainer`] takes steps and evaluates according to a [`TrainConfig`]. [`History`] has the losses so far, with their
//! chart and table. [`Checkpoint`] describes a saved run. Model, optimizer and batches are in [`model`](crate::model),
//! [`optim`](crate::optim) and [`data`](crate::data), and can be used without this module.
//!
//! ```
//! use tallow::data::Tokens;
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::Schedule;
//! use tallow::train::{TrainConfig, Trainer};
//!
//! let (train, validation) = Tokens::from_bytes("to be, or not to be. ".repeat(50))?.split(0.1)?;
//! let model = TransformerConfig {
//!     vocab_size: 256, context_length: 16, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&model, 0, &tallow::device("cpu")?)?;
//! let config = TrainConfig {
//!     batch_size: 4,
//!     sequence_length: 16,
//!     steps: 20,
//!     schedule: Schedule::Constant { lr: 1e-2 },
//!     ..Default::default()
//! };
//! let mut trainer = Trainer::new(model, config, train, validation)?;
//! let before = trainer.evaluate()?;
//! while let Some(step) = trainer.step()? {
//!     println!("{}: {:.3} nats", step.step, step.loss);
//! }
//! assert!(trainer.evaluate()? < before);
//! # Ok::<(), tallow::Error>(())
//! ```

mod checkpoint;
mod config;
#[cfg(feature = "report")]
mod curve;
mod data;
mod history;
mod parts;
mod ranks;
mod resume;
mod step;
mod trainer;

pub use checkpoint::Checkpoint;
pub use config::TrainConfig;
pub use data::{Data, DataFingerprint};
pub use history::{Evaluation, History};
pub use trainer::{StepReport, Trainer};
