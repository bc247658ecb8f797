//! Attention, by what is in memory meanwhile.
//!
//! - [`naive`]: all probabilities, one matrix after another; any heads, masks and lengths, any float.
//! - [`blocked`]: a block of queries at a time, on heads one after another: naive attention's results, faster.
//! - [`rotary`]: the same on heads as projections leave them, which it rotates to their positions on the way;
//!   [`rotary_heads`] rotates alone.
//! - [`flash`]: tiles, and no matrix of (queries, keys) at all.

pub mod blocked;
pub mod flash;
pub mod naive;
pub mod rotary;
pub mod rotary_heads;
