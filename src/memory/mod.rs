//! Where the bytes go: predicted before a run, measured during it.
//!
//! What lives here: [`estimate`], the breakdown of a step from its sizes alone, [`estimate_graph`], that of any traced
//! function, and what follows ([`largest_batch_size`], [`smallest_sequence_beyond`], [`smallest_sequence_saved`],
//! [`recommend`], [`most_frugal`]); [`attention_breakdown`] and [`self_attention_breakdown`], those of attention alone
//! and of its layer, and [`planned_attention_breakdown`]; [`tracker`], an allocator that counts; [`measure()`], a
//! step's peak by it; [`record()`] and [`record_on()`], which keep every block with its origin, and what is made of it:
//! sums ([`Recording`]), a picture ([`timeline()`]), PyTorch's snapshot ([`Snapshot`]); [`saved_tensors`], what a graph
//! holds; [`system`], what the process has taken; [`Meter`], a device's counters whatever the device. Functions, models
//! and attention alone are predicted for the kernels of the CPU or of a GPU ([`Kernels`]). What does not: timing
//! ([`crate::bench`]); what an op takes and keeps, which its own file says ([`Step`](crate::graph::Step)).

mod attention;
mod breakdown;
mod estimate;
mod fit;
mod layer;
mod measure;
mod meter;
mod naming;
mod planned;
mod recommend;
mod recording;
mod replay;
mod saved;
mod self_attention;
mod snapshot;
mod stack;
pub mod system;
mod timeline;
pub mod tracker;

pub use attention::{AttentionWorkload, attention_breakdown};
pub use breakdown::{MemoryBreakdown, MemoryKind, Part, smallest_beyond};
pub use estimate::{Estimate, Kernels, Mode, Workload, estimate, estimate_graph};
pub use fit::{largest_batch_size, smallest_sequence_beyond, smallest_sequence_saved};
pub use measure::{Measured, measure};
pub use meter::Meter;
pub use planned::planned_attention_breakdown;
pub use recommend::{most_frugal, recommend};
pub(crate) use recording::blocks_taken;
pub use recording::{
    Block, Holdings, Origin, PhaseSpan, RecordConfig, Recorder, Recording, record, record_on,
};
pub use saved::{GraphWatch, SavedTensor, SavedTensors, saved_tensors, watch_graphs};
pub use self_attention::{SelfAttentionWorkload, self_attention_breakdown};
pub use snapshot::Snapshot;
pub use timeline::timeline;
