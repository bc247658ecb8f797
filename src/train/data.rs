//! What a run reads: tokens, from which it cuts its batches, or batches of the caller's own.

use super::{DataFingerprint, TrainConfig};
use crate::data::{Batch, Batches, RandomBatches, SequentialBatches, Tokens};
use crate::{Error, Result};

/// The data of a run: [`Tokens`], or [`Batches`] that the caller makes. Both convert into it.
#[derive(Debug)]
pub enum Data {
    /// Windows of a token sequence: anywhere in it for training, one after another for evaluation.
    Tokens(Tokens),
    /// Batches in the order of their indices. Training batches are (`batch_size`, `sequence_length`) of the
    /// [`TrainConfig`]; its seed does not choose them.
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
    /// The fingerprint of the data, for a model of `vocab_size`.
    pub(super) fn fingerprint(&self, vocab_size: usize) -> Result<DataFingerprint> {
        match self {
            Self::Tokens(tokens) => DataFingerprint::new(tokens),
            Self::Batches(batches) => DataFingerprint::of_batches(&**batches, vocab_size),
        }
    }

    /// The batches to train on.
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

    /// The batches to evaluate on.
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

/// An error unless a training batch has the shape that a step is made for.
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
