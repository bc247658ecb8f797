//! Memory predicted from sizes alone, or from a trace: what a step, a pass, attention or its layer takes, and what
//! fits.

mod attention;
mod estimate;
mod fit;
mod layer;
mod letters;
mod lifetimes;
mod model;
mod naming;
mod planned;
mod recommend;
mod saved;
mod self_attention;
mod workload;

pub use attention::{AttentionWorkload, attention_breakdown};
pub use estimate::{Estimate, estimate, estimate_graph};
pub use fit::{largest_batch_size, largest_that_fits, smallest_sequence_beyond};
pub use planned::{
    planned_attention_breakdown, planned_breakdown, planned_self_attention_breakdown,
};
pub use recommend::{most_frugal, recommend};
pub use saved::{SavedTensor, SavedTensors, saved_tensors};
pub use self_attention::{SelfAttentionWorkload, self_attention_breakdown};
pub use workload::{Kernels, Mode, Workload};

use super::breakdown::{MemoryBreakdown, MemoryKind};
