//! The memory of a self-attention layer, from its sizes alone.

use super::attention::between;
use super::{Account, AttentionWorkload, Holds, Kernels};
use crate::attention::{Algorithm, Mask};
use crate::precision::Precision;
use candle_core::DType;

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
            dtype: self.compute_dtype(),
        }
    }

    /// What projections and attention are computed in: a region leaves f64 alone.
    fn compute_dtype(&self) -> DType {
        match self.precision.policy() {
            Some(_) if self.dtype != DType::F64 => self.precision.dtype(),
            _ => self.dtype,
        }
    }
}

/// What one self-attention layer holds on the CPU at its worst moment, with its weights and its input: predicted, for
/// deciding whether it fits.
///
/// The worst moment is the backward of attention or, where D is large beside B T, the storing of the last weight's
/// gradient, when the other three exist already and candle adds this one to zeros. In an autocast region weights, x
/// and the weights' gradients are f32, and copies of weights and x are there in half precision.
pub fn self_attention_account(workload: &SelfAttentionWorkload) -> Account {
    let stored = workload.dtype.size_in_bytes();
    let width = workload.compute_dtype().size_in_bytes();
    let [b, t, d] = [
        workload.batch_size,
        workload.sequence_length,
        workload.d_model,
    ]
    .map(|size| size as f64);
    let n = b * t * d;
    let kept = Account::new(format!(
        "B {}, T {}, D {}, H {}, {width} bytes an element",
        workload.batch_size, workload.sequence_length, workload.d_model, workload.heads
    ))
    .with(Holds::Weights, "weights", "4D^2", 4.0 * d * d, stored)
    .with(Holds::Inputs, "x", "BTD", n, stored);
    let casts = workload.compute_dtype() != workload.dtype;
    let kept = match casts && !workload.precision.drops_casts() {
        true => kept.with(
            Holds::WeightCasts,
            "cast weights",
            "4D^2",
            4.0 * d * d,
            width,
        ),
        false => kept,
    };
    let kept = match casts {
        true => kept.with(Holds::Activations, "cast x", "BTD", n, width),
        false => kept,
    };
    let kept = kept
        .with(Holds::Activations, "projections", "3BTD", 3.0 * n, width)
        .with(Holds::Activations, "q, k, v", "3BTD", 3.0 * n, width)
        .with(
            Holds::Activations,
            "out, merged, projected",
            "3BTD",
            3.0 * n,
            width,
        );
    let in_attention = kept
        .clone()
        .with(
            Holds::Gradients,
            "a weight's gradient",
            "D^2",
            d * d,
            stored,
        )
        .with(
            Holds::Scratch,
            "gradients of out, q, k, v",
            "4BTD",
            4.0 * n,
            width,
        );
    let in_attention = between(in_attention, &workload.attention(), Kernels::Cpu);
    // What attention keeps is alive until the end; what its backward takes is not.
    let saved = between(kept.clone(), &workload.attention(), Kernels::Cpu).without_backward();
    let at_first_weight = saved
        .clone()
        .with(
            Holds::Gradients,
            "2 weights' gradients",
            "2D^2",
            2.0 * d * d,
            stored,
        )
        .with(
            Holds::Scratch,
            "their zeros and sum",
            "2D^2",
            2.0 * d * d,
            stored,
        )
        .with(
            Holds::Scratch,
            "gradients of q, k, v",
            "3BTD",
            3.0 * n,
            width,
        );
    let at_last_weight = saved
        .with(
            Holds::Gradients,
            "4 weights' gradients",
            "4D^2",
            4.0 * d * d,
            stored,
        )
        .with(
            Holds::Scratch,
            "the last one's zeros and sum",
            "2D^2",
            2.0 * d * d,
            stored,
        )
        .with(Holds::Scratch, "gradient of a projection", "BTD", n, width);
    [in_attention, at_first_weight, at_last_weight]
        .into_iter()
        .max_by_key(Account::peak_bytes)
        .unwrap_or(kept)
}
