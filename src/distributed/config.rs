//! Configuration of a job's ranks, and of the exchange of gradients.

use crate::{Error, Result};
use candle_core::DType;
use std::fmt;
use std::time::Duration;

/// Configuration with which a process joins its job.
///
/// ```
/// use std::time::Duration;
/// use tallow::distributed::DistConfig;
///
/// let config = DistConfig { timeout: Duration::from_secs(60), ..Default::default() };
/// assert_eq!(config.device, "cpu");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DistConfig {
    /// `cuda`, where each rank uses the GPU of its local rank, or `cpu`. In a job of one rank any
    /// [`device`](crate::device()).
    pub device: String,
    /// The longest time that one covered call may last on any rank; 10 minutes by default.
    /// [`Communicator::apply_timeout`](super::Communicator::apply_timeout) lists the covered calls. If a call lasts
    /// longer, the job fails: all ranks get an error that names the rank that has failed.
    ///
    /// A call lasts while it works and while it waits for other ranks. The timeout must exceed each of these:
    ///
    /// - the time from the first rank's call of [`distributed::init`](super::init()) to the last rank's;
    /// - the longest step; the first one includes planning;
    /// - the longest step plus the longest work that only one rank does before it, because the others already wait in
    ///   the step. Such work is a save by rank 0 or, before the first step, loading data and weights.
    pub timeout: Duration,
    /// The most multiprocessors of a GPU that NCCL's collectives use; they run concurrently with the model's kernels.
    /// `None` leaves the choice to NCCL.
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

/// The way in which gradients are averaged over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Exchange {
    /// After backward, one all-reduce for each parameter.
    PerParameter,
    /// After backward, one all-reduce for all parameters.
    Flat,
    /// During backward: gradients are collected into buckets in the order in which they are complete, from the last
    /// layer to the first. A full bucket is averaged while backward continues. This applies to planned steps;
    /// [`Replicated::average`](super::Replicated::average) averages bucket by bucket after backward.
    Overlapped {
        /// Size at which a bucket is full; 0 exchanges each gradient by itself.
        bucket_bytes: u64,
    },
}

impl Exchange {
    /// Returns the size at which a bucket is full.
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

/// Data parallelism: every rank has the full model and a part of the batch, and gradients are averaged.
///
/// The default is that of PyTorch's `DistributedDataParallel`: buckets of 25 MiB, in the dtype of the gradients.
///
/// ```
/// use candle_core::DType;
/// use tallow::distributed::{Exchange, ReplicatedConfig};
///
/// let config = ReplicatedConfig { exchange: Exchange::Flat, dtype: Some(DType::BF16) };
/// config.validate()?;
/// assert!(ReplicatedConfig { dtype: Some(DType::F16), ..config }.validate().is_err());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicatedConfig {
    /// The way in which gradients are averaged.
    pub exchange: Exchange,
    /// The dtype to which gradients are rounded for the exchange: bf16 halves the bytes. `None` keeps their own dtype.
    /// Planned steps on the CPU do not support bf16.
    ///
    /// With bf16, a planned step on a GPU rounds only some gradients: those of weight matrices that a single op of the
    /// model reads. (The matmul that computes such a gradient writes it in bf16.) The gradients of embeddings, norms
    /// and tied heads are exchanged in f32. The step must have precision bf16, one micro-batch on each rank and no loss
    /// scaling; anything else is an error.
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
    /// Checks the configuration.
    ///
    /// # Errors
    /// [`Error::Config`] for a dtype that is neither bf16 nor f32 (f16's range is too small for sums of gradients).
    pub fn validate(&self) -> Result<()> {
        check_dtype("ReplicatedConfig", self.dtype)
    }
}

/// Fully sharded data parallelism: every rank has a shard of each weight.
///
/// ```
/// use candle_core::DType;
/// use tallow::distributed::FullyShardConfig;
///
/// let config = FullyShardConfig { dtype: Some(DType::BF16), ..Default::default() };
/// config.validate()?;
/// assert_eq!(config.bucket_bytes, 128 << 20);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullyShardConfig {
    /// The dtype to which gradients are rounded for the exchange, as in [`ReplicatedConfig::dtype`].
    pub dtype: Option<DType>,
    /// Size of a bucket in a planned step on a GPU, in bytes of full weights as they are gathered (bf16 if the matmuls
    /// are in bf16). A bucket takes whole modules, such as blocks, in order, until its size is at least this. A bucket
    /// is gathered while the one before it is in use: about two buckets of full weights exist at a time. Gradients are
    /// exchanged in buckets too.
    pub bucket_bytes: u64,
}

/// Gradients in their own dtype, buckets of 128 MiB.
impl Default for FullyShardConfig {
    fn default() -> Self {
        Self {
            dtype: None,
            bucket_bytes: 128 << 20,
        }
    }
}

impl FullyShardConfig {
    /// Checks the configuration.
    ///
    /// # Errors
    /// Those of [`ReplicatedConfig::validate`].
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
