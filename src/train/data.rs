//! The data of a run (tokens, or custom batches), checks of model and data, and fingerprints that detect other data.

use super::TrainConfig;
use crate::data::{Batch, Batches, RandomBatches, SequentialBatches, Tokens};
use crate::model::{TransformerConfig, TransformerLM};
use crate::{Error, Result};
use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The data of a run: [`Tokens`] or custom [`Batches`]. Both convert into it.
#[derive(Debug)]
pub enum Data {
    /// Windows of a token sequence: at random positions for training, consecutive ones for evaluation.
    Tokens(Tokens),
    /// Batches in the order of their indices. Training batches have the shape (`batch_size`, `sequence_length`) of the
    /// [`TrainConfig`]; its seed does not affect them.
    Batches(Box<dyn Batches>),
}

impl From<Tokens> for Data {
    fn from(tokens: Tokens) -> Self {
        Self::Tokens(tokens)
    }
}

impl<B: Batches + 'static> From<B> for Data {
    fn from(batches: B) -> Self {
        Self::Batches(Box::new(batches))
    }
}

impl Data {
    /// Returns the fingerprint of the data, for a model of `vocab_size`.
    pub(super) fn fingerprint(&self, vocab_size: usize) -> Result<DataFingerprint> {
        match self {
            Self::Tokens(tokens) => DataFingerprint::new(tokens),
            Self::Batches(batches) => DataFingerprint::of_batches(&**batches, vocab_size),
        }
    }

    pub(super) fn training(self, config: &TrainConfig) -> Result<Box<dyn Batches>> {
        let (batch_size, sequence_length) = (config.batch_size, config.sequence_length);
        match self {
            Self::Tokens(tokens) => {
                let batches = RandomBatches::new(&tokens, batch_size, sequence_length, config.seed);
                Ok(Box::new(batches?))
            }
            Self::Batches(batches) => Ok(batches),
        }
    }

    pub(super) fn validation(self, config: &TrainConfig) -> Result<Box<dyn Batches>> {
        match self {
            Self::Tokens(tokens) => {
                let (batch_size, sequence_length) = (config.batch_size, config.sequence_length);
                let batches = SequentialBatches::new(&tokens, batch_size, sequence_length);
                Ok(Box::new(batches?))
            }
            Self::Batches(batches) => Ok(batches),
        }
    }
}

/// Returns the batch; an error unless it has the shape that the step is planned for.
pub(super) fn check_shape(batch: Batch, config: &TrainConfig) -> Result<Batch> {
    let expected = [config.batch_size, config.sequence_length];
    if batch.inputs.dims() == expected && batch.targets.dims() == expected {
        return Ok(batch);
    }
    Err(Error::Shape {
        op: "Trainer",
        expected: format!("training batches {expected:?}, as in the TrainConfig"),
        got: format!(
            "inputs {:?}, targets {:?}",
            batch.inputs.dims(),
            batch.targets.dims()
        ),
        hint: "pad each batch to the configured size, with targets of ignore_index".into(),
    })
}

/// Refuses parameters that are not f32, nor f64 with precision f32.
pub(super) fn check_dtype(model: &TransformerLM, config: &TrainConfig) -> Result<()> {
    let precision = config.precision;
    let other = model.parameters().into_iter().find(|(_, parameter)| {
        let dtype = parameter.dtype();
        dtype != DType::F32 && (precision.dtype(), dtype) != (DType::F32, DType::F64)
    });
    let Some((name, parameter)) = other else {
        return Ok(());
    };
    let hint = "build it with TransformerLM::new; parameters in half precision are trained in a loop of your own by \
                backward and Optimizer::step";
    let got = format!("{name} in {}", parameter.dtype().as_str());
    let expected = format!("parameters in f32, for precision {precision}");
    Err(Error::dtype("Trainer", got).must_be(expected, hint))
}

/// Checks that the model can run on sequences of this data.
pub(super) fn check_fits(model: &TransformerLM, config: &TrainConfig, data: &Data) -> Result<()> {
    let context_length = model.config().context_length;
    if config.sequence_length > context_length {
        return Err(
            Error::config("TrainConfig", "sequence_length", config.sequence_length).must_be(
                format!("at most the model's context_length, {context_length}"),
                "shorten it, or build the model with a longer context_length",
            ),
        );
    }
    check_separator(config.separator, model.config())?;
    let vocab_size = model.config().vocab_size;
    if let Data::Tokens(tokens) = data
        && tokens.vocab_size() > vocab_size
    {
        return Err(
            Error::config("TransformerConfig", "vocab_size", vocab_size).must_be(
                format!("at least {}'s, {}", tokens, tokens.vocab_size()),
                "build the model with the data's vocab_size",
            ),
        );
    }
    Ok(())
}

/// Refuses a separator outside of the model's vocabulary.
fn check_separator(separator: Option<u32>, model: &TransformerConfig) -> Result<()> {
    match separator {
        Some(id) if id as usize >= model.vocab_size => {
            let expected = format!("under the model's vocab_size {}", model.vocab_size);
            let hint = "it is the id of the token that documents end with";
            Err(Error::config("TrainConfig", "separator", id).must_be(expected, hint))
        }
        _ => Ok(()),
    }
}

/// The most tokens that are hashed: all of smaller data, a sample of larger data.
const SAMPLE_TOKENS: usize = 1 << 20;
/// Tokens in a piece of the sample.
const PIECE_TOKENS: usize = 1 << 12;
/// The most batches that are read for a fingerprint.
const SAMPLE_BATCHES: u64 = 256;

/// A fingerprint of data in a checkpoint, which detects that a run is resumed with other data.
///
/// It depends on the data only, not on its location. For more than 2^20 tokens the hash covers 256 pieces of 4096,
/// evenly spread from the first token to the last: other data is detected, but a changed word in a large file may not
/// be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    /// Number of tokens; for batches, the number of ids that the hash covers.
    pub tokens: usize,
    /// The vocabulary size of the tokens; for batches, that of the model.
    pub vocab_size: usize,
    /// Hash of the ids, 16 hexadecimal digits.
    pub hash: String,
}

impl DataFingerprint {
    /// Computes the fingerprint of `tokens`.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) if an id that is hashed is outside the vocabulary.
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

    /// Computes the fingerprint of batches: of ids and targets in up to [`SAMPLE_BATCHES`] of a pass, evenly spread.
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

/// FNV-1a, which has the same values on every machine.
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

/// Yields the first indices of the pieces: consecutive, or spread so that the last piece ends with the data.
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
        let (tokens, vocab_size, hash) = (self.tokens, self.vocab_size, &self.hash);
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
