//! Ignored targets: those that the caller masks, and the first token of each packed document.

use super::TransformerLM;
use crate::attention::FirstKeys;
use crate::nn::ForwardContext;
use crate::ops::{CrossEntropyConfig, Reduction};
use crate::ops::{DropoutKey, inside_storage};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// The id of ignored targets; PyTorch's default `ignore_index`.
const IGNORED: i64 = -100;

/// The targets of a batch, some of which are ignored.
pub(crate) struct MaskedTargets {
    /// (B, T) i64: [`IGNORED`] for ignored targets.
    pub targets: Tensor,
    /// The first keys (B, T), if documents are packed.
    pub first_keys: Option<FirstKeys>,
    /// The number of targets that are not ignored.
    pub counted: usize,
}

impl MaskedTargets {
    /// Masks the targets that equal `ignore_index` and those of `separator` tokens. Returns `None` without both.
    ///
    /// # Errors
    /// Tokens or targets that are not (B, T) u32 or i64.
    pub fn of(
        tokens: &Tensor,
        targets: &Tensor,
        separator: Option<u32>,
        ignore_index: Option<i64>,
    ) -> Result<Option<Self>> {
        if separator.is_none() && ignore_index.is_none() {
            return Ok(None);
        }
        let first_keys = separator.map(|separator| FirstKeys::of_documents(tokens, separator));
        let first_keys = first_keys.transpose()?;
        let mut all = ids("targets", targets)?;
        if let Some(separator) = separator {
            for (token, target) in ids("tokens", tokens)?.into_iter().zip(&mut all) {
                if token == i64::from(separator) {
                    *target = IGNORED;
                }
            }
        }
        for target in &mut all {
            if Some(*target) == ignore_index {
                *target = IGNORED;
            }
        }
        let counted = all.iter().filter(|id| **id != IGNORED).count();
        let targets = Tensor::from_vec(all, targets.shape(), targets.device())?;
        Ok(Some(Self {
            targets,
            first_keys,
            counted,
        }))
    }
}

/// Copies ids to the host.
fn ids(what: &str, x: &Tensor) -> Result<Vec<i64>> {
    const OP: &str = "TransformerLM";
    if !matches!(x.dtype(), DType::U32 | DType::I64) {
        return Err(Error::dtype(OP, x.dtype().as_str()).must_be(
            format!("{what} in u32 or i64"),
            "convert with to_dtype(DType::U32)",
        ));
    }
    let flat = inside_storage(OP, x)?.flatten_all()?;
    Ok(flat.to_dtype(DType::I64)?.to_vec1()?)
}

impl TransformerLM {
    /// Computes the loss of packed documents, each of which ends with the token `separator`. A document attends only to
    /// itself, and the target of a separator is ignored. With a key, dropout is applied.
    ///
    /// It is [`loss_with`](Self::loss_with) with the first keys of [`FirstKeys::of_documents`]. For a planned step use
    /// [`Batch::masked`](crate::compile::Batch::masked).
    ///
    /// # Errors
    /// Those of [`loss_with`](Self::loss_with); tokens that are all separators; a trace, whose meta tensors have no
    /// tokens.
    pub fn loss_of_documents(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        separator: u32,
        dropout: Option<&DropoutKey>,
    ) -> Result<Tensor> {
        let context = |first_keys| ForwardContext {
            first_keys,
            dropout: dropout.cloned(),
            ..Default::default()
        };
        match MaskedTargets::of(tokens, targets, Some(separator), None)? {
            Some(masked) => {
                let context = context(masked.first_keys);
                self.loss_with(tokens, &masked.targets, &context, Some(IGNORED))
            }
            None => self.loss_with(tokens, targets, &context(None), None),
        }
    }

    /// Computes the sum of the losses of the targets of a [`MaskedTargets`] that are not ignored; 0 if there are none.
    pub(crate) fn sum_of_losses(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        context: &ForwardContext,
    ) -> Result<Tensor> {
        let config = CrossEntropyConfig {
            reduction: Reduction::Sum,
            ignore_index: Some(IGNORED),
            ..Default::default()
        };
        self.reduced_loss(tokens, targets, context, &config)
    }
}
