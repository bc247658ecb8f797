//! [`Batch`], and the cutting of windows that every kind of batches shares.

use candle_core::{Device, Tensor};

use super::tokens::Tokens;
use crate::{Error, Result, ops};

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
        return Err(Error::data(tokens.to_string(), format!("{} tokens", tokens.len())).must_be(format!(
                "more than {sequence_length} tokens ({config}: sequence_length {sequence_length}, and the target of \
                 its last token)"
            ), "give more data or a shorter sequence_length"));
    }
    Ok(())
}
