//! Models: a transformer language model, with configuration, FLOPs, weight files and sampling.
//!
//! [`ToyModel`] is a small network for experiments with mixed precision. Layers are in [`nn`](crate::nn), the training
//! loop is in [`train`](crate::train).
//!
//! ```
//! use tallow::model::{GenerateConfig, TransformerConfig, TransformerLM};
//!
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &tallow::device("cpu")?)?; // weights drawn from seed 0
//! assert_eq!(model.num_parameters(), config.num_parameters());
//! let tokens = model.generate(
//!     &[1, 2, 3],
//!     &GenerateConfig { max_new_tokens: 5, ..Default::default() },
//! )?;
//! assert_eq!(tokens.len(), 5);
//! # Ok::<(), tallow::Error>(())
//! ```

mod config;
pub(crate) mod depth;
mod documents;
#[cfg(feature = "files")]
mod file;
pub mod flops;
mod generate;
mod gpt2;
mod toy;
mod transformer;
mod validate;

pub use config::TransformerConfig;
pub(crate) use documents::MaskedTargets;
#[cfg(feature = "files")]
pub use file::LoadOptions;
#[cfg(feature = "train")]
pub(crate) use file::{HISTORY_PREFIX, STATE_PREFIX};
#[cfg(feature = "files")]
pub(crate) use file::{WeightSource, without_prefixes};
pub use generate::GenerateConfig;
pub use toy::{ToyActivations, ToyModel};
pub use transformer::TransformerLM;
pub(crate) use transformer::{HEAD, Origin};
