//! [`Tokens`]: a sequence of ids, in a file or in memory.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::source::{self, Source};
use crate::files::zeros;
use crate::{Error, Result};

/// Tokens that a scan reads at a time: few enough for a core's cache.
const SCAN_TOKENS: usize = 1 << 14;

/// A sequence of token ids with a known vocabulary size, in an open file or in memory. Never empty.
///
/// The constructor determines what a token is:
///
/// | constructor | one token is | vocabulary |
/// |---|---|---|
/// | [`bytes`](Self::bytes), [`from_bytes`](Self::from_bytes), [`source_tree`](Self::source_tree) | a byte | 256 |
/// | [`open`](Self::open), [`open_as`](Self::open_as) | an id of a token file | as given |
/// | [`from_ids`](Self::from_ids) | an id | as given |
/// | [`encoded`](Self::encoded) | an id that a tokenizer gives to a text | the tokenizer's |
///
/// `clone`, [`slice`](Self::slice) and [`split`](Self::split) copy no tokens. A file stays open and is read where
/// tokens are requested, so it may be far larger than memory. Opening a file checks its header and size. Ids are
/// checked whenever they are read, so an id outside the vocabulary is never returned; [`validate`](Self::validate)
/// checks all of them beforehand. If a file is shortened while in use, reading it is an error from then on. If it is
/// replaced by a rename, as [`write_tokens`](super::write_tokens) does, the old content stays in use.
///
/// ```
/// use tallow::data::Tokens;
///
/// let tokens = Tokens::from_bytes("to be or not to be")?; // a token is a byte
/// assert_eq!((tokens.len(), tokens.vocab_size()), (18, 256));
/// assert_eq!(tokens.slice(3..5)?.to_vec()?, [u32::from(b'b'), u32::from(b'e')]);
/// assert!(Tokens::from_ids([0, 1, 7], 5).is_err()); // 7 is outside the vocabulary
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokens {
    source: Arc<Source>,
    /// First token of this view in the source.
    start: usize,
    len: usize,
    vocab_size: usize,
}

impl Tokens {
    /// Creates the view of all of `source`, which has at least one token.
    pub(super) fn all_of(source: Source, vocab_size: usize) -> Self {
        Self {
            start: 0,
            len: source.len(),
            source: Arc::new(source),
            vocab_size,
        }
    }

    /// Returns the number of tokens, at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the vocabulary size; every id is less.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the tokens of `range`, without a copy.
    ///
    /// # Errors
    /// [`Error::Data`] if the range is empty or goes past the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.is_empty() || range.end > self.len {
            return Err(Error::Data {
                what: self.to_string(),
                expected: format!("a range of at least 1 token within 0..{}", self.len),
                got: format!("{}..{}", range.start, range.end),
                hint: "take a range inside the data".into(),
            });
        }
        Ok(Self {
            source: Arc::clone(&self.source),
            start: self.start + range.start,
            len: range.len(),
            vocab_size: self.vocab_size,
        })
    }

    /// Returns `(train, validation)`, without a copy: the first `floor(len * (1 - validation_fraction))` tokens, and
    /// the rest.
    ///
    /// # Errors
    /// [`Error::Config`] unless `0 < validation_fraction < 1`; [`Error::Data`] if one part gets no token.
    pub fn split(&self, validation_fraction: f64) -> Result<(Self, Self)> {
        if !(validation_fraction > 0.0 && validation_fraction < 1.0) {
            return Err(
                Error::config("Tokens::split", "validation_fraction", validation_fraction).must_be(
                    "over 0 and under 1",
                    "0.1 is usual; to keep all for training, do not split",
                ),
            );
        }
        let train_len = (self.len as f64 * (1.0 - validation_fraction)) as usize;
        if train_len == 0 || train_len >= self.len {
            let got = format!(
                "{train_len} to train and {} to validate (validation_fraction {validation_fraction})",
                self.len - train_len
            );
            return Err(Error::data(self.to_string(), got).must_be(
                "at least 1 token on each side of the split",
                "give more data or a fraction nearer to a half",
            ));
        }
        Ok((self.slice(0..train_len)?, self.slice(train_len..self.len)?))
    }

    /// Copies tokens `start..start + out.len()` into `out`.
    ///
    /// # Errors
    /// [`Error::Data`] if the range exceeds the data; [`Error::Format`], with byte offset and value, for an id outside
    /// the vocabulary; [`Error::Io`] if the file was shortened. The content of `out` is then unspecified.
    pub fn copy_to(&self, start: usize, out: &mut [u32]) -> Result<()> {
        if start > self.len || out.len() > self.len - start {
            return Err(Error::Data {
                what: self.to_string(),
                expected: format!("a range within 0..{}", self.len),
                got: format!("{} tokens from {start}", out.len()),
                hint: "take a range inside the data".into(),
            });
        }
        let first = self.start + start;
        self.source.decode(first, out)?;
        // Checked in the copy: the file could change between a check and a copy.
        if !self.width_fits_vocabulary()
            && let Some(position) = position_outside(out, self.vocab_size)
        {
            return Err(self.source.bad_id(
                "Tokens::copy_to",
                first + position,
                out[position],
                self.vocab_size,
            ));
        }
        Ok(())
    }

    /// Copies all tokens into memory.
    ///
    /// # Errors
    /// [`Error::Format`], with byte offset and value, for an id outside the vocabulary; [`Error::OutOfMemory`] if the
    /// tokens do not fit in memory.
    pub fn to_vec(&self) -> Result<Vec<u32>> {
        let mut ids = zeros(Path::new(&self.to_string()), "its ids", self.len)?;
        self.copy_to(0, &mut ids)?;
        Ok(ids)
    }

    /// Reads every token once and checks it, in constant memory. Call it before a long run: otherwise a bad id is an
    /// error of the first batch that has it.
    ///
    /// # Errors
    /// [`Error::Format`], with byte offset and value of the first id outside the vocabulary.
    pub fn validate(&self) -> Result<()> {
        if self.width_fits_vocabulary() {
            return Ok(());
        }
        let mut ids = vec![0; SCAN_TOKENS.min(self.len)];
        for start in (0..self.len).step_by(SCAN_TOKENS) {
            let count = SCAN_TOKENS.min(self.len - start);
            self.copy_to(start, &mut ids[..count])?;
        }
        Ok(())
    }

    pub(super) fn refuse_wider_ids(&self) -> Result<()> {
        source::refuse_wider_ids(&self.source, self.vocab_size)
    }

    fn width_fits_vocabulary(&self) -> bool {
        (self.source.width().max_id() as usize) < self.vocab_size
    }
}

/// Writes the source's name, and the range if this is only a part of it.
impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source.name())?;
        if self.len < self.source.len() {
            write!(f, " (tokens {}..{})", self.start, self.start + self.len)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens")
            .field("source", &self.to_string())
            .field("len", &self.len)
            .field("vocab_size", &self.vocab_size)
            .finish()
    }
}

/// Returns the index of the first id that is not less than `vocab_size` (at least 1).
pub(super) fn position_outside(ids: &[u32], vocab_size: usize) -> Option<usize> {
    let last_id = u32::try_from(vocab_size - 1).unwrap_or(u32::MAX);
    // One vectorised pass without an early exit; the search runs only if there is something to find.
    let any = ids.iter().fold(false, |any, &id| any | (id > last_id));
    if !any {
        return None;
    }
    ids.iter().position(|&id| id > last_id)
}
