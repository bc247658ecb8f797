//! Guides: pages for readers who come from another library, write a model of their own, train on several hosts, or read
//! a profile.
//!
//! - [`coming_from_candle`]: which ops to replace, how gradients are computed, which settings matter.
//! - [`coming_from_pytorch`]: a table of PyTorch's parts and what takes their place here, and the differences.
//! - [`own_model`]: a model of your own, with its loss in a planned step, predicted memory and files.
//! - [`several_hosts`]: a job on two hosts of eight GPUs each.
//! - [`reading_a_profile`]: the reports of `profile` and `memory_profile`, column by column.
//!
//! These modules contain documentation only.

pub mod coming_from_candle;
pub mod coming_from_pytorch;
pub mod own_model;
pub mod reading_a_profile;
pub mod several_hosts;
