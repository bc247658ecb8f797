//! Language models to plan, which need not exist.

use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Architecture;
use crate::{Error, Result, graph};
use candle_core::DType;

/// A model of hollow weights, for sequences of this length.
///
/// # Errors
/// A configuration that cannot work; a longer sequence than its context.
pub(crate) fn hollow(model: &TransformerConfig, sequence_length: usize) -> Result<TransformerLM> {
    model.validate()?;
    if sequence_length > model.context_length {
        return Err(Error::Config {
            config: "TransformerConfig",
            field: "context_length",
            expected: format!("at least {sequence_length}, the length of a sequence"),
            got: model.context_length.to_string(),
            hint: "shorten the sequence, or give the model a longer context_length".into(),
        });
    }
    let twin = match model.architecture {
        // Tables of angles, no longer than they are read.
        Architecture::Llama | Architecture::Gemma2 => TransformerConfig {
            context_length: sequence_length,
            ..model.clone()
        },
        Architecture::Gpt2 => model.clone(),
    };
    TransformerLM::of_any_length(&twin, graph::weights(DType::F32))
}
