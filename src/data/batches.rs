//! [`Batches`]: batches of a caller's own.

use super::{Batch, RandomBatches, SequentialBatches};
use crate::Result;
use candle_core::Device;
use std::fmt;

/// Batches of ids and targets that a caller makes: padded examples, masked prompts, several sources mixed.
///
/// [`Trainer`](crate::train::Trainer) takes them in place of [`Tokens`](super::Tokens). Targets that do not count have
/// the value of [`TrainConfig::ignore_index`](crate::train::TrainConfig::ignore_index), -100 in i64 for example.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::data::{Batch, Batches};
///
/// /// Questions with answers, of which only the answers are learned.
/// #[derive(Debug)]
/// struct Answers(Vec<[i64; 9]>); // four tokens of a question, then five of its answer
///
/// impl Batches for Answers {
///     fn len(&self) -> usize {
///         self.0.len()
///     }
///
///     fn batch(&self, index: u64, device: &Device) -> tallow::Result<Batch> {
///         let example = &self.0[index as usize % self.0.len()];
///         let mut targets = example[1..].to_vec();
///         targets[..3].fill(-100);
///         Ok(Batch {
///             inputs: Tensor::new(&example[..8], device)?.unsqueeze(0)?, // (1, 8)
///             targets: Tensor::new(targets, device)?.unsqueeze(0)?,
///         })
///     }
/// }
///
/// let batch = Answers(vec![[5, 9, 2, 0, 7, 7, 3, 1, 0]]).batch(0, &Device::Cpu)?;
/// assert_eq!(batch.targets.to_vec2::<i64>()?, [[-100, -100, -100, 7, 7, 3, 1, 0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
pub trait Batches: fmt::Debug + Send + Sync {
    /// The number of batches in one pass. An evaluation reads each of them once.
    fn len(&self) -> usize;

    /// Whether there is no batch.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Batch `index`, inputs and targets (B, T) u32 or i64 on `device`. The same index gives the same batch, so that a
    /// resumed run reads on where it stopped. Training reads indices beyond [`len`](Self::len) too: for the next
    /// passes.
    ///
    /// # Errors
    /// Those of the data.
    fn batch(&self, index: u64, device: &Device) -> Result<Batch>;
}

/// A pass has as many windows as start at different tokens.
impl Batches for RandomBatches {
    fn len(&self) -> usize {
        self.num_starts().div_ceil(self.batch_size())
    }

    fn batch(&self, index: u64, device: &Device) -> Result<Batch> {
        RandomBatches::batch(self, index, device)
    }
}

impl Batches for SequentialBatches {
    fn len(&self) -> usize {
        SequentialBatches::len(self)
    }

    fn batch(&self, index: u64, device: &Device) -> Result<Batch> {
        SequentialBatches::batch(self, usize::try_from(index).unwrap_or(usize::MAX), device)
    }
}
