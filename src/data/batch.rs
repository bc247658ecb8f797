//! [`Batch`], batches of a caller's own ([`Batches`]), and the cutting of windows that every kind of batches shares.

use super::tokens::Tokens;
use super::{RandomBatches, SequentialBatches};
use crate::{Error, Result, ops};
use candle_core::{Device, Tensor};
use std::fmt;

/// Sequences of ids, and for each position its target: of windows of a token sequence, the token that follows.
#[derive(Debug, Clone)]
pub struct Batch {
    /// (B, T) u32 or i64.
    pub inputs: Tensor,
    /// (B, T) u32 or i64: in a window, `targets[b][t]` is `inputs[b][t + 1]` where that exists.
    pub targets: Tensor,
}

impl Batch {
    /// B * T: how many predictions the loss of this batch is the mean of, and so its weight in a mean over batches of
    /// different sizes.
    pub fn num_targets(&self) -> usize {
        self.targets.elem_count()
    }

    /// One row for each of `starts`: `inputs` is `tokens[start..start + sequence_length]`, `targets` one further on.
    pub(super) fn cut(
        tokens: &Tokens,
        starts: impl ExactSizeIterator<Item = usize>,
        sequence_length: usize,
        device: &Device,
    ) -> Result<Self> {
        let shape = (starts.len(), sequence_length);
        let ids = shape.0.saturating_mul(shape.1);
        let bytes = ids.saturating_mul(2 * size_of::<u32>()); // inputs and targets
        ops::check_room("a batch", bytes as u64)?;
        ops::check_granted("a batch", bytes as u64)?;
        let mut inputs = vec![0u32; ids];
        let mut targets = inputs.clone();
        let rows = inputs
            .chunks_exact_mut(sequence_length)
            .zip(targets.chunks_exact_mut(sequence_length));
        for (start, (inputs, targets)) in starts.zip(rows) {
            // Decoded and checked once: a row's inputs are its targets moved by one.
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

/// What every kind of batches asks: sizes over zero, and data for one window at least.
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
