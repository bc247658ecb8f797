//! [`RandomBatches`]: batches to train on.

use candle_core::Device;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::batch::{Batch, check_sizes};
use super::tokens::Tokens;
use crate::{Error, Result};

/// Batches of windows that start anywhere in the data, each valid start as likely as any other.
///
/// The batch of a step depends on `(seed, step)` alone, so steps may be asked for in any order, and a resumed run
/// needs to know only at which step it is. The starts are specified, and will stay the same across versions: row `b`
/// of step `s` starts at `floor(x * num_starts / 2^64)`, where `x` is the `b`-th 64-bit word of the ChaCha8 stream with
/// the seed (little-endian, padded with zeros) as key and `s` as nonce.
#[derive(Debug, Clone)]
pub struct RandomBatches {
    tokens: Tokens,
    batch_size: usize,
    sequence_length: usize,
    seed: u64,
}

impl RandomBatches {
    /// Batches of `batch_size` windows of `sequence_length` tokens (and the target of the last one).
    ///
    /// # Errors
    /// [`Error::Config`] if a size is 0 or a batch would not fit the address space; [`Error::Data`] if `tokens` has
    /// fewer than `sequence_length + 1`.
    pub fn new(
        tokens: &Tokens,
        batch_size: usize,
        sequence_length: usize,
        seed: u64,
    ) -> Result<Self> {
        check_sizes("RandomBatches", tokens, batch_size, sequence_length)?;
        let batch_bytes = batch_size
            .checked_mul(sequence_length)
            .and_then(|ids| ids.checked_mul(size_of::<u32>()));
        if batch_bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::config(
                "RandomBatches",
                "batch_size",
                format!("{batch_size} rows of {sequence_length} tokens"),
            )
            .must_be(
                "a number of rows that can be addressed",
                "use a smaller batch",
            ));
        }
        Ok(Self {
            tokens: tokens.clone(),
            batch_size,
            sequence_length,
            seed,
        })
    }

    /// Windows in a batch.
    pub(super) fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// The batch of `step`: inputs and targets (batch_size, sequence_length) on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the machine has not the memory for it; [`Error::Format`] if a window holds an id
    /// outside the vocabulary (files need not have been checked before); candle's, if the device refuses.
    pub fn batch(&self, step: u64, device: &Device) -> Result<Batch> {
        Batch::cut(
            &self.tokens,
            self.starts(step),
            self.sequence_length,
            device,
        )
    }

    /// Where the rows of `step` start in the tokens, in order: `batch_size` numbers under
    /// [`num_starts`](Self::num_starts).
    pub fn starts(&self, step: u64) -> impl ExactSizeIterator<Item = usize> + use<> {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        let mut words = ChaCha8Rng::from_seed(key);
        words.set_stream(step);
        let num_starts = self.num_starts() as u128;
        // The most and the least likely start differ in probability by at most 2^-64.
        (0..self.batch_size)
            .map(move |_| ((u128::from(words.next_u64()) * num_starts) >> 64) as usize)
    }

    /// How many windows the data has: `tokens - sequence_length`, overlapping ones included.
    pub fn num_starts(&self) -> usize {
        self.tokens.len() - self.sequence_length
    }
}
