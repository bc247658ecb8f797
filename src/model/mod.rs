//! Whole models.
//!
//! What lives here: the language model with its configuration, how many FLOPs it costs, and sampling from it. What does
//! not: its layers ([`crate::nn`]), its training and its memory.

mod config;
pub mod flops;
mod generate;
mod transformer;

pub use config::TransformerConfig;
pub use generate::GenerateConfig;
pub use transformer::TransformerLM;
