//! Benchmarks: repeated runs with time and memory.
//!
//! [`Stopwatch`] times steps on a device and their phases. [`EndToEnd`] times a whole model, [`AttentionRun`]
//! attention, alone or in its layer; both also measure memory, and return an out-of-memory row instead of failing.
//! [`alternate()`] measures runs in turns. [`report`](crate::report) has statistics and tables.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{self, AttentionConfig};
//! use tallow::bench::Stopwatch;
//!
//! let device = Device::Cpu;
//! let q = Tensor::randn(0f32, 1.0, (1, 2, 64, 16), &device)?; // (B, H, T, Dh)
//! let config = AttentionConfig::default();
//! let timing = Stopwatch::new(&device)
//!     .warmup(1)
//!     .measure(3, || attention::flash(&q, &q, &q, &config))?;
//! assert_eq!(timing.samples_ms.len(), 3);
//! println!("{:.2} ms", timing.statistics()?.mean_ms);
//! # Ok::<(), tallow::Error>(())
//! ```

mod alternate;
mod attention;
mod end_to_end;
mod environment;
mod first_step;
mod memory_profile;
mod planned_run;
mod row;
mod stopwatch;
mod update;

pub use alternate::alternate;
pub use attention::{
    AttentionMemory, AttentionResult, AttentionRun, AttentionStatus, AttentionTask,
};
pub use end_to_end::{EndToEnd, Execution};
pub use environment::environment;
pub use first_step::FirstStep;
pub use memory_profile::MemoryProfile;
pub use row::{EndToEndRow, LossScaling, PhaseTime, Status, StepMemory, UPDATE};
pub use stopwatch::{Lap, LapTimings, Step, Stopwatch, Timing, time_once};
