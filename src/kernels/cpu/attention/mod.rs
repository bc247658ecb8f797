//! Attention on the CPU.
//!
//! - [`naive`]: keeps all probabilities in memory; any heads, masks and lengths, any float.
//! - [`flash`]: works in tiles, without a (queries, keys) matrix.

pub mod flash;
pub mod naive;
