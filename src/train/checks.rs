//! What a run's configuration asks of its model and its data.

use super::{Data, TrainConfig};
use crate::model::{TransformerConfig, TransformerLM};
use crate::optim::GradScaler;
use crate::{Error, Result};
use candle_core::DType;

/// The scaler of a run in f16; none where nothing is scaled.
pub(super) fn scaler(config: &TrainConfig) -> Result<Option<GradScaler>> {
    let scales = config.precision.dtype() == DType::F16 && config.loss_scaling.enabled;
    match scales {
        true => Ok(Some(GradScaler::new(config.loss_scaling)?)),
        false => Ok(None),
    }
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
    Err(Error::dtype("Trainer", format!("{name} in {}", parameter.dtype().as_str())).must_be(format!("parameters in f32, for precision {precision}"), "build it with TransformerLM::new; parameters in half precision are trained in a loop of your own by \
               backward and AdamW::step"))
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
