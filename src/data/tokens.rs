//! [`Tokens`]: a sequence of ids, wherever it is stored.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::source::{self, Source};
use crate::files::zeros;
use crate::{Error, Result};

/// Tokens looked at in one go by a scan: small enough to stay in a core's cache.
const SCAN_TOKENS: usize = 1 << 14;

/// A sequence of token ids with a known vocabulary size, in an open file or in memory. Never empty.
///
/// The constructor says how a file is read:
///
/// | constructor | one token is | vocabulary |
/// |---|---|---|
/// | [`bytes`](Self::bytes), [`from_bytes`](Self::from_bytes), [`source_tree`](Self::source_tree) | a byte | 256 |
/// | [`open`](Self::open), [`open_as`](Self::open_as) | an id of a token file | as given |
/// | [`from_ids`](Self::from_ids) | an id | as given |
/// | [`encoded`](Self::encoded) | an id that a tokenizer gives to a text | the tokenizer's |
///
/// `clone`, [`slice`](Self::slice) and [`split`](Self::split) copy no tokens. A file stays open and is read where
/// tokens are asked for, so it may be far larger than memory. Opening one checks its header and size; its ids are
/// checked whenever they are read, so an id outside the vocabulary never leaves it, and [`validate`](Self::validate)
/// checks them all beforehand. A file that is shortened while it is in use is an error from then on; one that is
/// replaced by a rename, as [`write_tokens`](super::write_tokens) does, stays what it was.
#[derive(Clone)]
pub struct Tokens {
    source: Arc<Source>,
    /// Of this view in the source.
    start: usize,
    len: usize,
    vocab_size: usize,
}

impl Tokens {
    /// The view of all of `source`, which holds at least one token.
    pub(super) fn whole(source: Source, vocab_size: usize) -> Self {
        Self {
            start: 0,
            len: source.len(),
            source: Arc::new(source),
            vocab_size,
        }
    }

    /// How many tokens there are: at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Every id is under it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokens of `range`, without a copy.
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

    /// `(train, validation)`, without a copy: the first `floor(len * (1 - validation_fraction))` tokens, and the rest.
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
    /// [`Error::Data`] if that goes past the end; [`Error::Format`], with the byte offset and the value, if one of
    /// them is no id of the vocabulary; [`Error::Io`] if their file was shortened. `out` then holds nothing to rely on.
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
        // Checked in the copy: the file itself could change between a check and a copy.
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

    /// All tokens, copied into memory.
    ///
    /// # Errors
    /// [`Error::Format`], with the byte offset and the value, if one is no id of the vocabulary;
    /// [`Error::OutOfMemory`] for more than there is room for.
    pub fn to_vec(&self) -> Result<Vec<u32>> {
        let mut ids = zeros(Path::new(&self.to_string()), "its ids", self.len)?;
        self.copy_to(0, &mut ids)?;
        Ok(ids)
    }

    /// Reads every token once and checks it, in constant memory. Worth a call before a long run; without it a bad id
    /// is an error of the first batch that meets it.
    ///
    /// # Errors
    /// [`Error::Format`], with the byte offset and the value of the first token that is no id of the vocabulary.
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

/// The source's name, and which part of it this is if not all.
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

/// Index of the first id that is not under `vocab_size` (at least 1).
pub(super) fn position_outside(ids: &[u32], vocab_size: usize) -> Option<usize> {
    let last_id = u32::try_from(vocab_size - 1).unwrap_or(u32::MAX);
    // Without an early exit it is one vectorised pass; the search runs only when it will find something.
    let any = ids.iter().fold(false, |any, &id| any | (id > last_id));
    if !any {
        return None;
    }
    ids.iter().position(|&id| id > last_id)
}
