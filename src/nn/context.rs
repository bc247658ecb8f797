//! Optional arguments of a forward pass: padding, score bias, document boundaries and dropout.

use crate::Result;
use crate::attention::{FirstKeys, KeyMask, ScoreBias};
use crate::ops::{self, Dropout, DropoutKey, check_probability};
use candle_core::Tensor;

/// Optional arguments of a forward pass. The default is evaluation, with one document and no padding in each sequence.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, DropoutRates, ForwardContext, TransformerBlock};
/// use tallow::ops::DropoutKey;
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let block = TransformerBlock::new(16, 2, 32, 1e-5, None, vb)?
///     .with_dropout(DropoutRates::all(0.5));
/// let x = Tensor::ones((1, 4, 16), DType::F32, &Device::Cpu)?; // (B, T, D)
/// let evaluated = block.forward_with(&x, &ForwardContext::default())?;
/// let trained = block.forward_with(&x, &ForwardContext::training(DropoutKey::new(42, 0)?))?;
/// assert_ne!(evaluated.to_vec3::<f32>()?, trained.to_vec3::<f32>()?);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ForwardContext {
    /// The boundaries of packed documents, (B, T): no position attends to a position before its first key.
    pub first_keys: Option<FirstKeys>,
    /// The keys that queries may attend to, in addition to the layer's mask: padding (B, T), or any pairs.
    pub key_mask: Option<KeyMask>,
    /// Terms that are added to the attention scores.
    pub bias: Option<ScoreBias>,
    /// The dropout key of a training step. Layers with [rates](DropoutRates) apply dropout only if there is a key.
    pub dropout: Option<DropoutKey>,
}

impl ForwardContext {
    /// Creates the context of packed documents.
    pub fn packed(first_keys: FirstKeys) -> Self {
        Self {
            first_keys: Some(first_keys),
            ..Self::default()
        }
    }

    /// Creates the context of padded sequences.
    pub fn padded(key_mask: KeyMask) -> Self {
        Self {
            key_mask: Some(key_mask),
            ..Self::default()
        }
    }

    /// Creates the context of a training step with dropout.
    pub fn training(dropout: DropoutKey) -> Self {
        Self {
            dropout: Some(dropout),
            ..Self::default()
        }
    }

    /// Returns the same context with the dropout site advanced by `sites`.
    pub fn at(&self, sites: usize) -> Self {
        Self {
            dropout: self.dropout.as_ref().map(|key| key.at(sites)),
            ..self.clone()
        }
    }

    /// Returns the dropout of a layer with this rate; `None` without a key or with a rate of 0.
    pub(crate) fn layer_dropout(&self, probability: f64) -> Option<Dropout> {
        let key = self.dropout.clone().filter(|_| probability != 0.0)?;
        Some(Dropout { probability, key })
    }

    /// Applies [`ops::dropout`](ops::dropout()) to x, if there is a key and a rate.
    ///
    /// # Errors
    /// Those of [`ops::dropout`](ops::dropout()).
    pub(crate) fn apply_dropout(&self, x: Tensor, probability: f64) -> Result<Tensor> {
        match self.layer_dropout(probability) {
            Some(dropout) => ops::dropout(&x, &dropout),
            None => Ok(x),
        }
    }
}

/// The dropout rates of a model in training; the places are those of GPT-2.
///
/// ```
/// use tallow::model::TransformerConfig;
/// use tallow::nn::DropoutRates;
///
/// let config = TransformerConfig {
///     dropout: DropoutRates { residual: 0.2, ..DropoutRates::all(0.1) },
///     ..TransformerConfig::preset("small")?
/// };
/// assert!(config.dropout.is_active());
/// assert_eq!(config.dropout.attention, 0.1);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DropoutRates {
    /// The rate for the input of the first block.
    pub embedding: f64,
    /// The rate for the attention probabilities.
    pub attention: f64,
    /// The rate for the outputs of attention and feed-forward network, before they are added to the residual stream.
    pub residual: f64,
}

impl DropoutRates {
    /// Returns the same rate for all places.
    pub const fn all(probability: f64) -> Self {
        Self {
            embedding: probability,
            attention: probability,
            residual: probability,
        }
    }

    /// Whether any rate is positive.
    pub fn is_active(&self) -> bool {
        *self != Self::default()
    }

    /// # Errors
    /// A rate outside [0, 1).
    pub(crate) fn check(&self, config: &'static str) -> Result<()> {
        check_probability(config, "dropout.embedding", self.embedding)?;
        check_probability(config, "dropout.attention", self.attention)?;
        check_probability(config, "dropout.residual", self.residual)
    }
}
