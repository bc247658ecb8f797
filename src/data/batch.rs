//! [`Batch`], custom batches ([`Batches`]), and the cutting of windows, which all batches share.

use super::tokens::Tokens;
use super::{RandomBatches, SequentialBatches};
use crate::{Error, Result, ops};
use candle_core::{Device, Tensor};
use std::fmt;

/// Sequences of ids, and a target for each position; in windows of a token sequence, the next token.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::data::Batch;
///
/// let ids = Tensor::new(&[[5u32, 6, 7, 8]], &Device::Cpu)?; // a window of four tokens
/// let batch = Batch { inputs: ids.narrow(1, 0, 3)?, targets: ids.narrow(1, 1, 3)? };
/// assert_eq!(batch.num_targets(), 3);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Batch {
    /// Input ids (B, T), u32 or i64.
    pub inputs: Tensor,
    /// Target ids (B, T), u32 or i64: in a window, `targets[b][t]` is `inputs[b][t + 1]` where that exists.
    pub targets: Tensor,
}

impl Batch {
    /// Returns B * T, the number of predictions. The loss is their mean, so this is the batch's weight in a mean over
    /// batches of different sizes.
    pub fn num_targets(&self) -> usize {
        self.targets.elem_count()
    }

    /// Cuts a row at each of `starts`: `inputs` is `tokens[start..start + sequence_length]`, `targets` one token later.
    pub(super) fn cut(
        tokens: &Tokens,
        starts: impl ExactSizeIterator<Item = usize>,
        sequence_length: usize,
        device: &Device,
    ) -> Result<Self> {
        let shape = (starts.len(), sequence_length);
        let ids = shape.0.saturating_mul(shape.1);
        let bytes = ids.saturating_mul(2 * size_of::<u32>()); // inputs and targets
        ops::check_fits_memory("a batch", bytes as u64)?;
        ops::check_granted("a batch", bytes as u64)?;
        let mut inputs = vec![0u32; ids];
        let mut targets = inputs.clone();
        let rows = inputs
            .chunks_exact_mut(sequence_length)
            .zip(targets.chunks_exact_mut(sequence_length));
        for (start, (inputs, targets)) in starts.zip(rows) {
            // Decoded and checked once: the inputs of a row are its targets shifted by one.
            tokens.copy_to(start, &mut inputs[..1])?;
            tokens.copy_to(start + 1, targets)?;
            inputs[1..].copy_from_slice(&targets[..sequence_length - 1]);
        }
        Ok(Self {
            inputs: Tensor::from_vec(inputs, shape, device)?,
            targets: Tensor::from_vec(targets, shape, device)?,
        })
    }
}

/// Checks that sizes are positive, and that the data has at least one window.
pub(super) fn check_sizes(
    config: &'static str,
    tokens: &Tokens,
    batch_size: usize,
    sequence_length: usize,
) -> Result<()> {
    for (field, value) in [
        ("batch_size", batch_size),
        ("sequence_length", sequence_length),
    ] {
        if value == 0 {
            return Err(Error::config(config, field, "0")
                .must_be("at least 1", "a batch needs at least one row of one token"));
        }
    }
    if tokens.len() <= sequence_length {
        let got = Error::data(tokens.to_string(), format!("{} tokens", tokens.len()));
        let expected = format!(
            "more than {sequence_length} tokens ({config}: sequence_length {sequence_length}, and the target of its \
             last token)"
        );
        return Err(got.must_be(expected, "give more data or a shorter sequence_length"));
    }
    Ok(())
}

/// Custom batches of ids and targets: padded examples, masked prompts, several sources mixed.
///
/// [`Trainer`](crate::train::Trainer) accepts them in place of [`Tokens`](super::Tokens). Targets that do not count
/// have the value of [`TrainConfig::ignore_index`](crate::train::TrainConfig::ignore_index), such as -100 in i64.
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
    /// Returns the number of batches in one pass. An evaluation reads each of them once.
    fn len(&self) -> usize;

    /// Returns whether there is no batch.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns batch `index`, inputs and targets (B, T), u32 or i64, on `device`. The same index must return the same
    /// batch, so that a resumed run continues with the same data. Training also reads indices from [`len`](Self::len)
    /// on, for further passes.
    ///
    /// # Errors
    /// Those of the data.
    fn batch(&self, index: u64, device: &Device) -> Result<Batch>;
}

/// The length of a pass is the number of starts divided by the batch size, rounded up.
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
