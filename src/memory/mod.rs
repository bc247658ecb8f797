//! Where the bytes go: predicted before a run, measured during it.
//!
//! What lives here: [`estimate`], the account of a step from its sizes alone; [`tracker`], an allocator that counts;
//! [`system`], what the process has taken. What does not: timing ([`crate::bench`]).

mod estimate;
pub mod system;
pub mod tracker;

pub use estimate::{Estimate, Mode, Workload, estimate};
