//! Memory measured while a step runs: by an allocator that counts, and by a device's counters.

mod meter;
mod peak;
pub mod system;
pub mod tracker;

pub use meter::Meter;
pub use peak::{Measured, measure};
