//! Whole models.
//!
//! What lives here: the language model with its configuration, how many FLOPs it costs, and sampling from it; and the
//! toy on which mixed precision is explained. What does not: their layers ([`crate::nn`]), training and memory.

mod config;
mod depth;
#[cfg(feature = "files")]
mod file;
pub mod flops;
mod generate;
mod toy;
mod transformer;

pub(crate) use config::PARAMETERS_FORMULA;
pub use config::TransformerConfig;
#[cfg(feature = "files")]
pub use file::LoadOptions;
#[cfg(feature = "train")]
pub(crate) use file::{HISTORY_PREFIX, STATE_PREFIX};
pub use generate::GenerateConfig;
pub use toy::{ToyActivations, ToyModel};
pub use transformer::TransformerLM;
