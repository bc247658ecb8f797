//! Attention, by what is in memory meanwhile.
//!
//! - [`naive`]: all probabilities; any heads, masks and lengths, any float.
//! - [`flash`]: tiles, and no matrix of (queries, keys) at all.

pub mod flash;
pub mod naive;
