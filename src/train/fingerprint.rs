//! Knowing data again.

use crate::Result;
use crate::data::{Batches, Tokens};
use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Tokens that are looked at: all of up to a million, of more a sample.
const SAMPLE_TOKENS: usize = 1 << 20;
/// Tokens in one piece of the sample.
const PIECE_TOKENS: usize = 1 << 12;
/// Batches that are read for a fingerprint, at most.
const SAMPLE_BATCHES: u64 = 256;

/// What a checkpoint knows of its data: enough to notice that a run goes on with other data.
///
/// Where the data lies does not matter, only what it is. Of more than 2^20 tokens the hash covers 256 pieces of 4096,
/// evenly spread from the first token to the last: other data is noticed, a changed word in a large file may not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    /// How many tokens; of batches, how many ids its hash covers.
    pub tokens: usize,
    /// Their vocabulary; of batches, the model's.
    pub vocab_size: usize,
    /// A hash of their ids, 16 hexadecimal digits.
    pub hash: String,
}

impl DataFingerprint {
    /// The fingerprint of `tokens`.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) if an id that it looks at is outside the vocabulary.
    pub fn new(tokens: &Tokens) -> Result<Self> {
        let mut hash = Hash::default();
        let mut ids = Vec::with_capacity(PIECE_TOKENS);
        for start in piece_starts(tokens.len()) {
            ids.resize(PIECE_TOKENS.min(tokens.len() - start), 0);
            tokens.copy_to(start, &mut ids)?;
            hash.add(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        Ok(Self {
            tokens: tokens.len(),
            vocab_size: tokens.vocab_size(),
            hash: hash.digits(),
        })
    }

    /// The fingerprint of batches: of ids and targets in up to [`SAMPLE_BATCHES`] of a pass, evenly spread.
    pub(super) fn of_batches(batches: &dyn Batches, vocab_size: usize) -> Result<Self> {
        let (mut hash, mut tokens, len) = (Hash::default(), 0, batches.len() as u64);
        hash.add(len.to_le_bytes());
        let sample = len.min(SAMPLE_BATCHES);
        for i in 0..sample {
            let batch = batches.batch(i * len / sample, &Device::Cpu)?;
            tokens += batch.inputs.elem_count();
            for ids in [batch.inputs, batch.targets] {
                let ids = ids.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
                hash.add(ids.iter().flat_map(|id| id.to_le_bytes()));
            }
        }
        Ok(Self {
            tokens,
            vocab_size,
            hash: hash.digits(),
        })
    }
}

/// FNV-1a, which gives the same values on every machine.
struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn add(&mut self, bytes: impl IntoIterator<Item = u8>) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn digits(&self) -> String {
        format!("{:016x}", self.0)
    }
}

/// Where the pieces start: one after another, or spread so that the last piece ends with the data.
fn piece_starts(len: usize) -> Box<dyn Iterator<Item = usize>> {
    if len <= SAMPLE_TOKENS {
        return Box::new((0..len).step_by(PIECE_TOKENS));
    }
    let pieces = SAMPLE_TOKENS / PIECE_TOKENS;
    let last_start = (len - PIECE_TOKENS) as u128;
    Box::new((0..pieces as u128).map(move |i| (i * last_start / (pieces as u128 - 1)) as usize))
}

impl fmt::Display for DataFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tokens,
            vocab_size,
            hash,
        } = self;
        write!(
            f,
            "{tokens} tokens of vocabulary {vocab_size} (hash {hash})"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_small_data_and_reach_both_ends_of_large_data() {
        let small: Vec<usize> = piece_starts(2 * PIECE_TOKENS + 1).collect();
        assert_eq!(small, [0, PIECE_TOKENS, 2 * PIECE_TOKENS]);
        for len in [SAMPLE_TOKENS + 1, 10 * SAMPLE_TOKENS + 7] {
            let large: Vec<usize> = piece_starts(len).collect();
            assert_eq!(large.len(), SAMPLE_TOKENS / PIECE_TOKENS);
            assert_eq!(large.first(), Some(&0));
            assert_eq!(large.last(), Some(&(len - PIECE_TOKENS)));
            assert!(large.is_sorted());
        }
    }
}
