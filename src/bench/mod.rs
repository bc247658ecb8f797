//! Running work repeatedly and measuring it.
//!
//! [`Stopwatch`] times steps on a device. What the samples mean, and how they are printed, is in
//! [`report`](crate::report).

mod stopwatch;

pub use stopwatch::{Step, Stopwatch, Timing, time_once};
