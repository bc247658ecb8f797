//! Guides: pages for readers who come from another library, who train on several hosts, or who read a profile.
//!
//! - [`coming_from_candle`]: which ops to replace, how gradients are computed, which settings matter.
//! - [`coming_from_pytorch`]: a table of PyTorch's parts and what takes their place here, and the differences.
//! - [`several_hosts`]: a job on two hosts of eight GPUs each.
//! - [`reading_a_profile`]: the reports of `profile` and `memory_profile`, column by column.
//!
//! These modules contain documentation only.

pub mod coming_from_candle;
pub mod coming_from_pytorch;
pub mod reading_a_profile;
pub mod several_hosts;
