//! Running work repeatedly and measuring it.
//!
//! [`Stopwatch`] times steps on a device, [`Laps`] the phases inside them, [`EndToEnd`] a whole model's, with memory
//! beside time and an out-of-memory row instead of a crash. What the samples mean, and how they are printed, is in
//! [`report`](crate::report).

mod end_to_end;
mod environment;
mod laps;
mod stopwatch;

pub use end_to_end::{EndToEnd, OptimizerChoice};
pub use environment::environment;
pub use laps::{Lap, LapTimings, Laps};
pub use stopwatch::{Step, Stopwatch, Timing, time_once};
