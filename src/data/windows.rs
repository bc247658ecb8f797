//! Batches of windows: [`RandomBatches`] for training, [`SequentialBatches`] for evaluation.

use super::batch::{Batch, check_sizes};
use super::tokens::Tokens;
use crate::{Error, Result};
use candle_core::Device;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Batches of windows at random positions; all valid starts are equally likely.
///
/// The batch of a step depends only on `(seed, step)`, so steps may be requested in any order, and a resumed run needs
/// only its step number. The starts are specified, and will not change between versions: row `b` of step `s` starts at
/// `floor(x * num_starts / 2^64)`, where `x` is the `b`-th 64-bit word of the ChaCha8 stream with the seed
/// (little-endian, padded with zeros) as key and `s` as nonce.
///
/// ```
/// use candle_core::Device;
/// use tallow::data::{RandomBatches, Tokens};
///
/// let ids: Vec<u32> = (0..100).collect();
/// let batches = RandomBatches::new(&Tokens::from_ids(ids, 100)?, 2, 3, 1234)?; // B = 2, T = 3
/// let batch = batches.batch(7, &Device::Cpu)?; // of step 7
/// for (row, start) in batch.inputs.to_vec2::<u32>()?.into_iter().zip(batches.starts(7)) {
///     let start = start as u32;
///     assert_eq!(row, [start, start + 1, start + 2]);
/// }
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RandomBatches {
    tokens: Tokens,
    batch_size: usize,
    sequence_length: usize,
    seed: u64,
}

impl RandomBatches {
    /// Creates batches of `batch_size` windows of `sequence_length` tokens (and the target of the last one).
    ///
    /// # Errors
    /// [`Error::Config`] if a size is 0 or a batch exceeds the address space; [`Error::Data`] if `tokens` has fewer
    /// than `sequence_length + 1`.
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

    pub(super) fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Returns the batch of `step`: inputs and targets (batch_size, sequence_length), u32, on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the batch does not fit in memory; [`Error::Format`] if a window has an id outside the
    /// vocabulary (a file's ids may be unchecked before); candle's errors on the device.
    pub fn batch(&self, step: u64, device: &Device) -> Result<Batch> {
        Batch::cut(
            &self.tokens,
            self.starts(step),
            self.sequence_length,
            device,
        )
    }

    /// Returns the first token of each row of `step`, in order: `batch_size` numbers less than
    /// [`num_starts`](Self::num_starts).
    pub fn starts(&self, step: u64) -> impl ExactSizeIterator<Item = usize> + use<> {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        let mut words = ChaCha8Rng::from_seed(key);
        words.set_stream(step);
        let num_starts = self.num_starts() as u128;
        // The probabilities of any two starts differ by at most 2^-64.
        (0..self.batch_size)
            .map(move |_| ((u128::from(words.next_u64()) * num_starts) >> 64) as usize)
    }

    /// Returns the number of windows, including overlapping ones: `tokens - sequence_length`.
    pub fn num_starts(&self) -> usize {
        self.tokens.len() - self.sequence_length
    }
}

/// Batches that predict every token of the data but the first, each exactly once and in order.
///
/// The windows do not overlap: each starts at the last target of the previous one, and sees nothing before its start.
/// All rows of a batch have the same length. Full batches come first, then one with the remaining rows, then the tokens
/// that are fewer than a window as a batch of one row. Batches therefore differ in size; the mean over the data is
/// `sum(loss * num_targets) / sum(num_targets)` with [`Batch::num_targets`].
///
/// ```
/// use candle_core::Device;
/// use tallow::data::{SequentialBatches, Tokens};
///
/// let ids: Vec<u32> = (0..9).collect();
/// let batches = SequentialBatches::new(&Tokens::from_ids(ids, 9)?, 4, 3)?; // B = 4, T = 3
/// let all = batches.iter(&Device::Cpu).collect::<tallow::Result<Vec<_>>>()?;
/// assert_eq!(all[0].targets.to_vec2::<u32>()?, [[1, 2, 3], [4, 5, 6]]);
/// assert_eq!(all[1].targets.to_vec2::<u32>()?, [[7, 8]]); // the remainder
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SequentialBatches {
    tokens: Tokens,
    batch_size: usize,
    sequence_length: usize,
}

impl SequentialBatches {
    /// Creates batches of at most `batch_size` windows of at most `sequence_length` tokens.
    ///
    /// # Errors
    /// [`Error::Config`] if a size is 0; [`Error::Data`] if `tokens` has fewer than `sequence_length + 1`.
    pub fn new(tokens: &Tokens, batch_size: usize, sequence_length: usize) -> Result<Self> {
        check_sizes("SequentialBatches", tokens, batch_size, sequence_length)?;
        Ok(Self {
            tokens: tokens.clone(),
            batch_size,
            sequence_length,
        })
    }

    /// Returns the number of batches, at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.num_window_batches() + usize::from(self.tail() > 0)
    }

    /// Returns the number of targets in all batches: the number of tokens minus 1.
    pub fn num_targets(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Returns the batch at `index`, on `device`: (rows, sequence_length), or (1, rest) for the remainder at the end.
    ///
    /// # Errors
    /// [`Error::Data`] if `index` is [`len`](Self::len) or more; [`Error::Format`] if a window has an id outside the
    /// vocabulary (a file's ids may be unchecked before); candle's errors on the device.
    pub fn batch(&self, index: usize, device: &Device) -> Result<Batch> {
        if index >= self.len() {
            return Err(Error::Data {
                what: format!("batches of {}", self.tokens),
                expected: format!("an index under {}", self.len()),
                got: index.to_string(),
                hint: "SequentialBatches::len says how many there are".into(),
            });
        }
        if index == self.num_window_batches() {
            let start = self.num_targets() - self.tail();
            return Batch::cut(&self.tokens, std::iter::once(start), self.tail(), device);
        }
        let first = index * self.batch_size;
        let rows = self.batch_size.min(self.num_windows() - first);
        let starts = (first..first + rows).map(|window| window * self.sequence_length);
        Batch::cut(&self.tokens, starts, self.sequence_length, device)
    }

    /// Returns all batches, in order.
    pub fn iter(&self, device: &Device) -> impl ExactSizeIterator<Item = Result<Batch>> {
        (0..self.len()).map(|index| self.batch(index, device))
    }

    fn num_windows(&self) -> usize {
        self.num_targets() / self.sequence_length
    }

    fn num_window_batches(&self) -> usize {
        self.num_windows().div_ceil(self.batch_size)
    }

    /// Returns the number of targets after the last full window.
    fn tail(&self) -> usize {
        self.num_targets() % self.sequence_length
    }
}
