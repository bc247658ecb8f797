//! Memory predicted from sizes alone, or from a trace: what a step, a pass, attention or its layer takes, and what
//! fits.

mod attention;
mod estimate;
mod fit;
mod letters;
mod lifetimes;
mod planned;
mod saved;
mod workload;

pub use attention::{
    AttentionWorkload, SelfAttentionWorkload, attention_breakdown, self_attention_breakdown,
};
pub use estimate::{Estimate, estimate, estimate_graph};
pub use fit::{
    largest_batch_size, largest_that_fits, most_frugal, recommend, smallest_sequence_beyond,
};
pub use planned::{
    planned_attention_breakdown, planned_breakdown, planned_self_attention_breakdown,
};
pub use saved::{SavedTensor, SavedTensors, saved_tensors};
pub use workload::{Kernels, Mode, Workload};

use super::breakdown::{MemoryBreakdown, MemoryKind};
