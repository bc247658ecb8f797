//! tallow
#![deny(missing_docs)]

pub mod attention;
pub mod bench;
pub mod data;
pub mod device;
mod error;
mod files;
mod grad;
pub mod kernels;
pub mod model;
pub mod nn;
pub mod ops;
pub mod report;

pub use device::device;
pub use error::{Error, Result};
pub use grad::{is_grad_enabled, no_grad};
