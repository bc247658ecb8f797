//! Token ids to vectors.

use super::{Layer, check_weight, join, variable};
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

/// A table of one vector for each token, (V, D).
///
/// It starts from a normal distribution of standard deviation 1, cut at 3.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    padding_id: Option<u32>,
}

impl Embedding {
    /// Takes `weight` (vocab_size, d_model) from the builder.
    ///
    /// # Errors
    /// Whatever the builder answers: a missing or misshapen weight, say.
    pub fn new(vocab_size: usize, d_model: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_std(vocab_size, d_model, 1.0, vb)
    }

    /// As [`new`](Self::new), where the table starts from another standard deviation: GPT-2's from 0.02, since as the
    /// head too one of 1 would give logits in the tens.
    ///
    /// # Errors
    /// As [`new`](Self::new).
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

    /// The layer of this table, (V, D): a variable's tensor is trained, a plain one is not.
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

    /// Returns the same layer, whose row of `padding_id` gets no gradient, as with `padding_idx` in PyTorch; `None`
    /// trains every row. Initial values do not depend on it.
    pub fn with_padding(self, padding_id: Option<u32>) -> Self {
        Self { padding_id, ..self }
    }

    /// The table, (V, D).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// tokens (...) u32 to (..., D).
    ///
    /// # Errors
    /// As [`ops::embedding()`] and, with a padding id, [`ops::embedding_with_padding()`].
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match self.padding_id {
            Some(id) => ops::embedding_with_padding(tokens, &self.weight, id),
            None => ops::embedding(tokens, &self.weight),
        }
    }
}

impl Layer for Embedding {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
    }
}
