//! Where the bytes go: predicted before a run, measured during it.
//!
//! What lives here: [`estimate`], the account of a step from its sizes alone, and what follows from it
//! ([`largest_batch_size`], [`smallest_sequence_beyond`], [`smallest_sequence_saved`], [`recommend`]); [`attention_account`] and
//! [`self_attention_account`], those of attention alone and of its layer; [`tracker`], an allocator that counts;
//! [`system`], what the process has taken. What does not: timing ([`crate::bench`]).

mod account;
mod attention;
mod estimate;
mod fit;
mod recommend;
mod self_attention;
pub mod system;
pub mod tracker;
mod walk;

pub use account::{Account, Holds, Part, smallest_beyond};
pub use attention::{AttentionWorkload, attention_account};
pub use estimate::{Estimate, Mode, Workload, estimate};
pub use fit::{largest_batch_size, smallest_sequence_beyond, smallest_sequence_saved};
pub use recommend::recommend;
pub use self_attention::{SelfAttentionWorkload, self_attention_account};
