//! What a run reads: tokens, from which it cuts its batches, or batches of the caller's own; and what it asks of model
//! and data.

use super::{DataFingerprint, TrainConfig};
use crate::data::{Batch, Batches, RandomBatches, SequentialBatches, Tokens};
use crate::model::{TransformerConfig, TransformerLM};
use crate::{Error, Result};
use candle_core::DType;

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

/// Refuses parameters that are not in f32, or in f64 where the precision is f32.
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
                backward and AdamW::step";
    let got = format!("{name} in {}", parameter.dtype().as_str());
    let expected = format!("parameters in f32, for precision {precision}");
    Err(Error::dtype("Trainer", got).must_be(expected, hint))
}

/// Whether the model can run on sequences of this data.
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

/// An error for documents that end with a token which the model has not.
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
