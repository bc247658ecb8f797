//! The memory of a self-attention layer, from its trace.

use super::layer::{self, Layer};
use super::letters::{Letter, other_head_dim};
use super::lifetimes::{Buffer, elements};
use super::{AttentionWorkload, Kernels, MemoryBreakdown, MemoryKind};
use crate::attention::{Algorithm, Mask};
use crate::nn::CausalSelfAttention;
use crate::precision::Precision;
use crate::{Result, graph};
use candle_core::{DType, Tensor};

/// One [`CausalSelfAttention`](crate::nn::CausalSelfAttention) without positions, forward and backward: x (B, T, D).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfAttentionWorkload {
    /// What computes attention.
    pub algorithm: Algorithm,
    /// B.
    pub batch_size: usize,
    /// T.
    pub sequence_length: usize,
    /// D.
    pub d_model: usize,
    /// H.
    pub heads: usize,
    /// Of weights and inputs.
    pub dtype: DType,
    /// The region that forward runs in: f32 for none.
    pub precision: Precision,
}

/// Naive, batch 8, one head, 128 tokens, d_model 256, in f32.
impl Default for SelfAttentionWorkload {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Naive,
            batch_size: 8,
            sequence_length: 128,
            d_model: 256,
            heads: 1,
            dtype: DType::F32,
            precision: Precision::F32,
        }
    }
}

impl SelfAttentionWorkload {
    /// The same in `precision`: weights and input in its dtype for parameters, forward in its region.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self {
            dtype: precision.parameter_dtype(),
            precision,
            ..self
        }
    }

    /// The attention inside it.
    pub fn attention(&self) -> AttentionWorkload {
        AttentionWorkload {
            algorithm: self.algorithm,
            batch_size: self.batch_size,
            heads: self.heads,
            sequence_length: self.sequence_length,
            head_dim: self.d_model / self.heads.max(1),
            mask: Mask::Causal,
            documents: 1,
            dropout: 0.0,
            dtype: self.compute_dtype(),
        }
    }

    /// It, of hollow weights, to be traced.
    fn forward(&self) -> Result<Tensor> {
        let shape = (self.batch_size, self.sequence_length, self.d_model);
        let weights = graph::weights(self.dtype);
        let layer = CausalSelfAttention::new(self.d_model, self.heads, None, weights)?;
        let x = graph::input("x", shape, self.dtype)?;
        let layer = layer.with_attention(self.algorithm);
        self.precision.run(|| layer.forward(&x))
    }

    /// What projections and attention are computed in: a region leaves f64 alone.
    pub(crate) fn compute_dtype(&self) -> DType {
        match self.precision.policy() {
            Some(_) if self.dtype != DType::F64 => self.precision.dtype(),
            _ => self.dtype,
        }
    }
}

/// What one self-attention layer holds on the CPU at its worst moment, with its weights and its input: predicted, for
/// deciding whether it fits.
///
/// It is predicted from its trace, as [`estimate_graph`](super::estimate_graph()) does for any function.
///
/// The worst moment is the backward of attention or, where D is large beside B T, that of the last weight, when the
/// other three's gradients exist already. In an autocast region weights, x and the weights' gradients are f32, and
/// copies of weights and x are there in half precision.
///
/// ```
/// use tallow::memory::{SelfAttentionWorkload, self_attention_breakdown};
///
/// let breakdown = self_attention_breakdown(&SelfAttentionWorkload { d_model: 4096, ..Default::default() })?;
/// assert!(breakdown.to_string().contains("weights 4D^2 256.0 MiB"));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// What the layer does not take: a D that H does not divide, heads too wide for flash.
pub fn self_attention_breakdown(workload: &SelfAttentionWorkload) -> Result<MemoryBreakdown> {
    let w = workload;
    let [b, t, d, h] = [w.batch_size, w.sequence_length, w.d_model, w.heads];
    let attention = w.attention();
    let width = w.dtype.size_in_bytes();
    let resident =
        |kind, what, formula, elements| Buffer::new(kind, what, formula, elements, width);
    let (weight, x) = (elements(&[d, d]), elements(&[b, t, d]));
    let width = attention.dtype.size_in_bytes();
    let dh = attention.head_dim;
    let (head_dim, of_head_dim) = other_head_dim(dh);
    layer::breakdown(Layer {
        workload: w,
        forward: SelfAttentionWorkload::forward,
        kernels: Kernels::Cpu,
        residents: vec![
            resident(MemoryKind::Weights, "weights", "4D^2", 4.0 * weight),
            resident(MemoryKind::Inputs, "x", "BTD", x),
        ],
        largest: weight.max(x).max(attention.largest()),
        letters: vec![
            Letter::new("B", b, &[(3, 1)]),
            Letter::new("H", h, &[(7, 1)]),
            Letter::new("T", t, &[(5, 1)]),
            Letter::new("D", d, &[(7, 1), of_head_dim]),
            Letter::new("Dh", dh, &[of_head_dim]),
        ],
        other: SelfAttentionWorkload {
            batch_size: b.saturating_mul(3),
            sequence_length: t.saturating_mul(5),
            d_model: h.saturating_mul(7).saturating_mul(head_dim),
            heads: h.saturating_mul(7),
            ..*w
        },
        sizes: format!("B {b}, T {t}, D {d}, H {h}, {width} bytes an element"),
    })
}
