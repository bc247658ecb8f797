//! Where the bytes go: predicted before a run, measured during it.
//!
//! What lives here: in `predict`, [`estimate`], the breakdown of a step from its sizes alone, [`estimate_graph`], that
//! of any traced function, and what follows ([`largest_batch_size`], [`smallest_sequence_beyond`],
//! [`smallest_sequence_saved`], [`recommend`], [`most_frugal`]); [`attention_breakdown`] and
//! [`self_attention_breakdown`], those of attention alone and of its layer, and [`planned_attention_breakdown`]; in
//! `measure`, [`tracker`], an allocator that counts; [`measure()`], a step's peak by it; [`record()`] and
//! [`record_on()`], which keep every block with its origin, and what is made of it: sums ([`MemoryRecording`]), a picture
//! ([`timeline()`]), PyTorch's snapshot ([`Snapshot`]); [`saved_tensors`], what a graph holds; [`system`], what the
//! process has taken; [`Meter`], a device's counters whatever the device. Functions, models and attention alone are
//! predicted for the kernels of the CPU or of a GPU ([`Kernels`]). What does not: timing ([`crate::bench`]); what an op
//! takes and keeps, which its own file says ([`Step`](crate::graph::Step)).

mod breakdown;
mod counts;
mod measure;
mod predict;
mod record;

pub use breakdown::{MemoryBreakdown, MemoryKind, Part, smallest_beyond};
pub use measure::{
    GraphWatch, Measured, Meter, SavedTensor, SavedTensors, measure, saved_tensors, system,
    tracker, watch_graphs,
};
pub use predict::{
    AttentionWorkload, Estimate, Kernels, Mode, SelfAttentionWorkload, Workload,
    attention_breakdown, estimate, estimate_graph, largest_batch_size, most_frugal,
    planned_attention_breakdown, planned_self_attention_breakdown, recommend,
    self_attention_breakdown, smallest_sequence_beyond, smallest_sequence_saved,
};
pub(crate) use record::blocks_taken;
pub use record::{
    Block, Holdings, MemoryRecording, Origin, PhaseSpan, RecordConfig, Recorder, Snapshot, record,
    record_on, timeline,
};
