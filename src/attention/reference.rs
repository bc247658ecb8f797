//! Both algorithms in plain candle ops: their specifications.

pub use super::flash::reference as flash;
pub use super::naive::reference as naive;
