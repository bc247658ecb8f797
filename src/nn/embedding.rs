//! Token embedding.

use super::{Layer, check_weight, join, variable};
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

/// A table of embeddings (V, D), one row for each token.
///
/// Initial values are normal with standard deviation 1, truncated at 3 standard deviations.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Embedding};
///
/// let table = Embedding::new(100, 16, nn::seeded(0, DType::F32, &Device::Cpu).pp("table"))?;
/// let tokens = Tensor::new(&[[3u32, 1, 4]], &Device::Cpu)?; // (B, T)
/// assert_eq!(table.forward(&tokens)?.dims(), [1, 3, 16]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    padding_id: Option<u32>,
}

impl Embedding {
    /// Creates a table with `weight` (vocab_size, d_model) from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(vocab_size: usize, d_model: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_std(vocab_size, d_model, 1.0, vb)
    }

    /// Creates a table with another standard deviation of the initial values. GPT-2 uses 0.02: its table is the head
    /// too, and 1 would give logits in the tens.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_std(
        vocab_size: usize,
        d_model: usize,
        stdev: f64,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev };
        let weight = variable(&vb, "weight", (vocab_size, d_model), init)?;
        Ok(Self {
            weight,
            padding_id: None,
        })
    }

    /// Creates a layer from a table (V, D). It is trained if it is a variable's tensor, else frozen.
    ///
    /// # Errors
    /// A table that is not a matrix.
    pub fn from_weight(weight: Tensor) -> Result<Self> {
        check_weight(
            "nn::Embedding",
            "weight (V, D)",
            &weight,
            weight.rank() == 2,
        )?;
        Ok(Self {
            weight,
            padding_id: None,
        })
    }

    /// Sets the padding id, whose row gets no gradient (PyTorch's `padding_idx`); with `None` every row is trained.
    /// Initial values do not depend on it.
    pub fn with_padding(self, padding_id: Option<u32>) -> Self {
        Self { padding_id, ..self }
    }

    /// Returns the table (V, D).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Maps tokens (...), u32 or i64, to embeddings (..., D).
    ///
    /// # Errors
    /// Those of [`ops::embedding()`], or with a padding id of [`ops::embedding_with_padding()`].
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match self.padding_id {
            Some(id) => ops::embedding_with_padding(tokens, &self.weight, id),
            None => ops::embedding(tokens, &self.weight),
        }
    }
}

/// Shares the table of a `candle_nn::Embedding`; a variable stays one.
///
/// # Errors
/// Those of [`Embedding::from_weight`].
impl TryFrom<candle_nn::Embedding> for Embedding {
    type Error = Error;

    fn try_from(layer: candle_nn::Embedding) -> Result<Self> {
        Self::from_weight(layer.embeddings().clone())
    }
}

impl Layer for Embedding {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
    }
}
