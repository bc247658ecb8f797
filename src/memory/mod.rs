//! The memory of a training step: predicted from sizes before a run, measured and recorded during it.
//!
//! - Predicted: [`estimate`] for a model, [`estimate_graph`] for any traced function; [`attention_breakdown`],
//!   [`self_attention_breakdown`] and [`planned_attention_breakdown`] for attention on the kernels of the CPU or of a
//!   GPU ([`Target`]); [`planned_breakdown`] for any plan; [`saved_tensors`] for what forward saves for backward.
//!   [`largest_batch_size`], [`smallest_sequence_not_fitting`], [`recommend`] and [`least_memory_checkpointing`] use
//!   these.
//! - Measured: [`tracker`] counts allocations, [`measure()`] returns a step's peak by these counts, [`Meter`] reads the
//!   counters of any device, and [`system`] the process's resident memory.
//! - Recorded: [`record()`] and [`record_on()`] record every block with its origin ([`MemoryRecording`]). A chart
//!   ([`timeline()`]) and PyTorch's snapshot ([`Snapshot`]) are made from the recording.
//!
//! ```
//! use tallow::memory::{Mode, Workload, estimate};
//! use tallow::model::TransformerConfig;
//!
//! let config = TransformerConfig::preset("small")?;
//! let forward = Workload {
//!     batch_size: 4,
//!     sequence_length: 256,
//!     mode: Mode::Forward,
//!     ..Default::default()
//! };
//! let training = Workload { mode: Mode::TrainStep, ..forward.clone() };
//! let (forward, training) = (estimate(&config, &forward)?, estimate(&config, &training)?);
//! assert!(forward.peak_bytes < training.peak_bytes);
//! println!("{training}");
//! # Ok::<(), tallow::Error>(())
//! ```

mod attention;
mod breakdown;
mod estimate;
mod fit;
mod letters;
mod lifetimes;
mod measure;
mod planned;
mod record;
mod saved;
pub mod system;
pub mod tracker;
mod workload;

pub use attention::{
    AttentionWorkload, SelfAttentionWorkload, attention_breakdown, self_attention_breakdown,
};
pub use breakdown::{MemoryBreakdown, MemoryKind, Term};
pub use estimate::{Estimate, estimate, estimate_graph};
pub use fit::{
    largest_batch_size, largest_that_fits, least_memory_checkpointing, recommend,
    smallest_sequence_not_fitting,
};
pub use measure::{Measured, Meter, measure};
pub use planned::{
    planned_attention_breakdown, planned_breakdown, planned_self_attention_breakdown,
};
pub(crate) use record::blocks_allocated;
pub use record::{
    Block, BytesByKind, MemoryRecording, PhaseSpan, RecordConfig, Recorder, Snapshot, record,
    record_on, timeline,
};
pub use saved::{SavedTensor, SavedTensors, saved_tensors};
pub use workload::{Mode, Target, Workload};
