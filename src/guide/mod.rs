//! Guides: pages for readers who come from another library, write a model of their own, train on several hosts, or read
//! a profile.
//!
//! - [`names`]: PyTorch's names, module by module, and candle's, and what takes the place of each.
//! - [`coming_from_pytorch`]: a training loop, eagerly and planned, and the differences that matter.
//! - [`coming_from_candle`]: which ops to replace, how gradients are computed, which settings matter.
//! - [`own_model`]: a model of your own, with its loss in a planned step, predicted memory and files.
//! - [`several_hosts`]: a job on two hosts of eight GPUs each.
//! - [`reading_a_profile`]: the reports of `profile` and `memory_profile`, column by column.
//!
//! These modules contain documentation only.

pub mod coming_from_candle;
pub mod coming_from_pytorch;
pub mod names;
pub mod own_model;
pub mod reading_a_profile;
pub mod several_hosts;
