//! Running work repeatedly and measuring it.
//!
//! [`Stopwatch`] times steps on a device and the phases inside them, [`EndToEnd`] a whole model's, and [`AttentionRun`]
//! those of attention, alone or in its layer, with memory next to time and an out-of-memory row instead of a crash.
//! [`alternate()`] measures runs in turns. [`report`](crate::report) has their statistics and tables.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{self, AttentionConfig};
//! use tallow::bench::Stopwatch;
//!
//! let device = Device::Cpu;
//! let q = Tensor::randn(0f32, 1.0, (1, 2, 64, 16), &device)?; // (B, H, T, Dh)
//! let config = AttentionConfig::default();
//! let timing = Stopwatch::new(&device).warmup(1).measure(3, || attention::flash(&q, &q, &q, &config))?;
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
mod stopwatch;
mod update;

pub use alternate::alternate;
pub use attention::{AttentionRun, AttentionTask, Limit, Sampling};
pub use end_to_end::{EndToEnd, Execution};
pub use environment::environment;
pub use memory_profile::MemoryProfile;
pub use stopwatch::{Lap, LapTimings, Step, Stopwatch, Timing, time_once};
