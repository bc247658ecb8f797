//! What a forward takes beside its input: where documents begin, what is dropped.

use crate::Result;
use crate::attention::FirstKeys;
use crate::ops::{self, Dropout, DropoutKey, check_probability};
use candle_core::Tensor;

/// What a forward takes beside its input. The default is evaluation of one text a sequence.
#[derive(Clone, Debug, Default)]
pub struct ForwardContext {
    /// Where the documents begin that are packed into the sequences, (B, T): no position sees one before its first key.
    pub first_keys: Option<FirstKeys>,
    /// What a training step drops, of layers that have [rates](DropoutRates); without a key none drops anything.
    pub dropout: Option<DropoutKey>,
}

impl ForwardContext {
    /// Of sequences with these first keys.
    pub fn packed(first_keys: FirstKeys) -> Self {
        Self {
            first_keys: Some(first_keys),
            dropout: None,
        }
    }

    /// Of a training step.
    pub fn training(dropout: DropoutKey) -> Self {
        Self {
            first_keys: None,
            dropout: Some(dropout),
        }
    }

    /// The same, with dropout at sites so many further.
    pub fn at(&self, sites_further: usize) -> Self {
        Self {
            first_keys: self.first_keys.clone(),
            dropout: self.dropout.as_ref().map(|key| key.at(sites_further)),
        }
    }

    /// What is dropped with this probability; `None` for nothing.
    pub(crate) fn dropping(&self, probability: f64) -> Option<Dropout> {
        let key = self.dropout.clone().filter(|_| probability != 0.0)?;
        Some(Dropout { probability, key })
    }

    /// [`ops::dropout`](ops::dropout()) of x, if anything is dropped.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn dropped(&self, x: Tensor, probability: f64) -> Result<Tensor> {
        match self.dropping(probability) {
            Some(dropout) => ops::dropout(&x, &dropout),
            None => Ok(x),
        }
    }
}

/// The probabilities with which a model drops elements in training, as GPT-2 has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DropoutRates {
    /// Of what the first block reads.
    pub embedding: f64,
    /// Of attention's probabilities.
    pub attention: f64,
    /// Of what attention and feed-forward network add to the residual stream.
    pub residual: f64,
}

impl DropoutRates {
    /// The same everywhere.
    pub const fn all(probability: f64) -> Self {
        Self {
            embedding: probability,
            attention: probability,
            residual: probability,
        }
    }

    /// Whether anything is dropped.
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// # Errors
    /// A probability that is not from 0 to under 1.
    pub(crate) fn check(&self, config: &'static str) -> Result<()> {
        check_probability(config, "dropout.embedding", self.embedding)?;
        check_probability(config, "dropout.attention", self.attention)?;
        check_probability(config, "dropout.residual", self.residual)
    }
}
