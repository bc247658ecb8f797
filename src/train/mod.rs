//! The training loop: batches in, a better model out, and files from which a run goes on.
//!
//! What lives here: [`Trainer`], which takes steps and evaluates; [`TrainConfig`], what it is told; [`History`], the
//! losses so far with their chart and table; [`Checkpoint`], what a saved run says about itself. What does not: the
//! model, the optimizer and the batches, which are usable without any of this ([`crate::model`], [`crate::optim`],
//! [`crate::data`]).
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
mod fingerprint;
mod history;
mod planned;
mod trainer;
mod update;

pub use checkpoint::Checkpoint;
pub use config::TrainConfig;
pub use fingerprint::DataFingerprint;
pub use history::{Evaluation, History};
pub use trainer::{StepReport, Trainer};
