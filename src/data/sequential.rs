//! [`SequentialBatches`]: batches to evaluate on.

use candle_core::Device;

use super::batch::{Batch, check_sizes};
use super::tokens::Tokens;
use crate::{Error, Result};

/// Batches that predict every token of the data but the first, each exactly once and in order.
///
/// The windows do not overlap: each starts on the last target of the one before, and sees nothing from before its
/// start. A batch's rows are all of one length: full batches come first, then one with the rows that are left, then
/// what is shorter than a window as a batch of one row. So batches differ in size, and the mean over the data is
/// `sum(loss * num_targets) / sum(num_targets)` with [`Batch::num_targets`].
#[derive(Debug, Clone)]
pub struct SequentialBatches {
    tokens: Tokens,
    batch_size: usize,
    sequence_length: usize,
}

impl SequentialBatches {
    /// Batches of at most `batch_size` windows of at most `sequence_length` tokens.
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

    /// How many batches there are: at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.num_window_batches() + usize::from(self.tail() > 0)
    }

    /// Targets over all batches: the number of tokens less one.
    pub fn num_targets(&self) -> usize {
        self.tokens.len() - 1
    }

    /// The batch at `index`, on `device`: (rows, sequence_length), or (1, rest) for what is left at the end.
    ///
    /// # Errors
    /// [`Error::Data`] if `index` is [`len`](Self::len) or more; [`Error::Format`] if a window holds an id outside the
    /// vocabulary (files need not have been checked before); candle's, if the device refuses.
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

    /// All batches, in order.
    pub fn iter(&self, device: &Device) -> impl ExactSizeIterator<Item = Result<Batch>> {
        (0..self.len()).map(|index| self.batch(index, device))
    }

    /// Windows of full length.
    fn num_windows(&self) -> usize {
        self.num_targets() / self.sequence_length
    }

    fn num_window_batches(&self) -> usize {
        self.num_windows().div_ceil(self.batch_size)
    }

    /// Targets after the last full window.
    fn tail(&self) -> usize {
        self.num_targets() % self.sequence_length
    }
}
