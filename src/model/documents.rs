//! Sequences into which documents are packed, each of which ends with a separator.

use super::TransformerLM;
use crate::Result;
use crate::attention::FirstKeys;
use crate::nn::ForwardContext;
use crate::ops::DropoutKey;
use crate::ops::inside_storage;
use candle_core::{DType, Tensor};

/// What a target is that does not count: no token of any vocabulary.
pub(crate) const IGNORED: u32 = u32::MAX;

/// Which keys packed documents see, and what they predict.
pub(crate) struct Documents {
    /// (B, T) i64: [`IGNORED`] where the token before is a separator.
    pub targets: Tensor,
    /// (B, T).
    pub first_keys: FirstKeys,
    /// How many targets count.
    pub counted: usize,
}

impl Documents {
    /// # Errors
    /// Tokens or targets that are not (B, T) u32 or i64.
    pub fn of(tokens: &Tensor, targets: &Tensor, separator: u32) -> Result<Self> {
        const OP: &str = "TransformerLM";
        let first_keys = FirstKeys::of_documents(tokens, separator)?;
        let ids = |x: &Tensor| -> Result<Vec<i64>> {
            let flat = inside_storage(OP, x)?.flatten_all()?;
            Ok(flat.to_dtype(DType::I64)?.to_vec1()?)
        };
        let (tokens, mut ids) = (ids(tokens)?, ids(targets)?);
        let mut counted = ids.len();
        for (token, target) in tokens.into_iter().zip(&mut ids) {
            if token == i64::from(separator) {
                *target = IGNORED.into();
                counted -= 1;
            }
        }
        let targets = Tensor::from_vec(ids, targets.shape(), targets.device())?;
        Ok(Self {
            targets,
            first_keys,
            counted,
        })
    }
}

impl TransformerLM {
    /// As [`loss`](Self::loss), where several documents may be packed into a sequence, each ending with the token
    /// `separator`: a document attends to itself alone, and nothing has to be predicted from a separator. With a key it
    /// is a training step's, with dropout.
    ///
    /// It is [`loss_with`](Self::loss_with) the first keys of [`FirstKeys::of_documents`]. A planned step does the same
    /// by [`PlanConfig::separator`](crate::compile::PlanConfig::separator).
    ///
    /// # Errors
    /// As [`loss_with`](Self::loss_with), also for tokens that are all separators; in a trace, which does not know
    /// where hollow tokens have separators.
    pub fn loss_of_documents(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        separator: u32,
        dropout: Option<&DropoutKey>,
    ) -> Result<Tensor> {
        let documents = Documents::of(tokens, targets, separator)?;
        self.loss_of(tokens, documents, dropout.cloned())
    }

    /// The same of documents that are known.
    pub(crate) fn loss_of(
        &self,
        tokens: &Tensor,
        documents: Documents,
        dropout: Option<DropoutKey>,
    ) -> Result<Tensor> {
        let context = ForwardContext {
            first_keys: Some(documents.first_keys),
            dropout,
        };
        self.loss_with(tokens, &documents.targets, &context, Some(IGNORED))
    }
}
