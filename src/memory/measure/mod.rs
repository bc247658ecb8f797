//! Memory measured while a step runs: by an allocator that counts, by a device's counters, and by what a graph holds.

mod meter;
mod peak;
mod saved;
pub mod system;
pub mod tracker;

pub use meter::Meter;
pub use peak::{Measured, measure};
pub use saved::{GraphWatch, SavedTensor, SavedTensors, saved_tensors, watch_graphs};
