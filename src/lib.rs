//! tallow
#![deny(missing_docs)]

pub mod attention;
mod error;
mod files;
mod grad;
pub mod kernels;
pub mod nn;
pub mod ops;

pub use error::{Error, Result};
pub use grad::{is_grad_enabled, no_grad};
