//! How ranks come together, and how they exchange gradients.

use crate::{Error, Result};
use candle_core::DType;
use std::fmt;
use std::time::Duration;

/// How a process joins its job.
#[derive(Clone, Debug, PartialEq)]
pub struct DistConfig {
    /// `cuda`, of which each rank takes the GPU of its local rank, or `cpu`. In a job of one rank any
    /// [`device`](crate::device()).
    pub device: String,
    /// How long a rank is waited for, at the beginning and in everything that all do together, before it has failed.
    pub timeout: Duration,
    /// At most so many of a GPU's multiprocessors work on NCCL's collectives, which run beside the model's kernels.
    /// `None`: as many as NCCL wants.
    pub nccl_max_ctas: Option<u32>,
}

/// The CPU, ten minutes.
impl Default for DistConfig {
    fn default() -> Self {
        Self {
            device: "cpu".into(),
            timeout: Duration::from_secs(600),
            nccl_max_ctas: None,
        }
    }
}

/// When gradients are averaged over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Exchange {
    /// After backward, one all-reduce for each parameter.
    PerParameter,
    /// After backward, one all-reduce for all of them.
    Flat,
    /// In backward: gradients are collected into buckets in the order in which they are complete, from the last layer's
    /// to the first's, and a bucket is averaged while backward goes on, as soon as it has so many bytes. 0: every
    /// gradient by itself. That is in planned steps; [`Replicated::average`](super::Replicated::average) averages
    /// bucket by bucket after backward.
    Overlapped {
        /// A bucket is full with these.
        bucket_bytes: u64,
    },
}

impl Exchange {
    /// A bucket is full with these.
    pub(crate) fn bucket_bytes(self) -> u64 {
        match self {
            Self::PerParameter => 0,
            Self::Flat => u64::MAX,
            Self::Overlapped { bucket_bytes } => bucket_bytes,
        }
    }
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PerParameter => f.pad("one by one"),
            Self::Flat => f.pad("flat"),
            Self::Overlapped { bucket_bytes: 0 } => f.pad("overlapped, one by one"),
            Self::Overlapped { bucket_bytes } => {
                let (unit, name) = match *bucket_bytes {
                    0..1024 => (1.0, "bytes"),
                    1024..1_048_576 => (1024.0, "KiB"),
                    _ => (1_048_576.0, "MiB"),
                };
                let size = (10.0 * *bucket_bytes as f64 / unit).round() / 10.0;
                f.pad(&format!("buckets of {size} {name}"))
            }
        }
    }
}

/// Data parallelism: every rank has the whole model and a part of the batch, and gradients are averaged.
///
/// The default is PyTorch's (`DistributedDataParallel`): buckets of 25 MiB, in the gradients' own dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicatedConfig {
    /// When gradients are averaged.
    pub exchange: Exchange,
    /// What gradients are rounded to for the exchange: bf16 halves the bytes. `None`: they are exchanged as they are.
    /// Planned steps on the CPU do not take bf16.
    ///
    /// In a planned step on a GPU the gradients of matrices are then made in bf16 by the products themselves, as with
    /// [an optimizer in backward](crate::compile::StepConfig::optimizer_in_backward); those of embedding and norms stay
    /// in f32, and so do all where micro-batches are accumulated or the loss is scaled.
    pub dtype: Option<DType>,
}

impl Default for ReplicatedConfig {
    fn default() -> Self {
        let bucket_bytes = 25 << 20;
        Self {
            exchange: Exchange::Overlapped { bucket_bytes },
            dtype: None,
        }
    }
}

impl ReplicatedConfig {
    /// Whether gradients can be exchanged so.
    ///
    /// # Errors
    /// [`Error::Config`] for a dtype that is neither bf16 nor f32 (f16's range is too small for sums of gradients).
    pub fn validate(&self) -> Result<()> {
        check_dtype("ReplicatedConfig", self.dtype)
    }
}

/// Fully sharded data parallelism: every rank has a part of each weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullyShardConfig {
    /// What gradients are rounded to for the exchange, as [`ReplicatedConfig::dtype`] says.
    pub dtype: Option<DType>,
    /// In a planned step on a GPU weights are gathered together that are read one after the other, block by block,
    /// until they have so many bytes, while the ones before are at work; and so are gradients. The most weights that
    /// are there as a whole are twice as many, or those of two blocks.
    pub bucket_bytes: u64,
}

/// Gradients as they are, 128 MiB.
impl Default for FullyShardConfig {
    fn default() -> Self {
        Self {
            dtype: None,
            bucket_bytes: 128 << 20,
        }
    }
}

impl FullyShardConfig {
    /// Whether gradients can be exchanged so.
    ///
    /// # Errors
    /// [`Error::Config`], as [`ReplicatedConfig::validate`].
    pub fn validate(&self) -> Result<()> {
        check_dtype("FullyShardConfig", self.dtype)
    }
}

fn check_dtype(config: &'static str, dtype: Option<DType>) -> Result<()> {
    match dtype {
        None | Some(DType::BF16 | DType::F32) => Ok(()),
        Some(other) => Err(Error::config(config, "dtype", other.as_str())
            .must_be("None, bf16 or f32", "None exchanges gradients as they are")),
    }
}
