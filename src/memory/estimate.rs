//! The memory of a pass or a step, from its sizes alone.

use crate::Result;
use crate::attention::Algorithm;
use crate::model::TransformerConfig;
use serde::{Deserialize, Serialize};

/// How much of a training step is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The forward pass under `no_grad`.
    Forward,
    /// The forward pass with its graph kept, as before a backward.
    ForwardKeepingGraph,
    /// Forward, loss and backward.
    ForwardBackward,
    /// Forward, loss, backward and AdamW.
    #[default]
    TrainStep,
}

/// What is run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// B.
    pub batch_size: usize,
    /// T.
    pub sequence_length: usize,
    /// How much of a step.
    pub mode: Mode,
    /// What computes attention: here, not in the model's configuration. Naive where a serialized workload says nothing.
    #[serde(default)]
    pub attention: Algorithm,
}

/// Bytes of an eager pass or step in f32, by what they hold.
///
/// N = B T; S is what attention keeps beside its inputs and output: the probabilities, B H T^2, if it is naive; the
/// log-sum-exp of their rows, B H T, if it is flash. Sizes are in elements of 4 bytes. Left out: the packing buffers of
/// matrix products and of flash attention, a few MiB a thread whatever the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// P: the weights.
    pub parameter_bytes: u64,
    /// P, with a backward: one gradient a weight.
    pub gradient_bytes: u64,
    /// 2 P, with the optimizer: AdamW's exp_avg and exp_avg_sq.
    pub optimizer_bytes: u64,
    /// What the blocks' graph holds until backward: `L (16 N D + 3 N F + S + 2 N) + 2 N D + N`. Every op's input and
    /// output, once each.
    pub activation_bytes: u64,
    /// N V: the logits.
    pub logit_bytes: u64,
    /// What comes and goes at the worst moment, beyond the above.
    pub transient_bytes: u64,
    /// The most that is alive at once.
    pub peak_bytes: u64,
}

/// The account of one pass or step, before anything is allocated.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{Mode, Workload, estimate};
/// use tallow::model::TransformerConfig;
///
/// let workload = Workload { batch_size: 4, sequence_length: 256, mode: Mode::TrainStep, ..Default::default() };
/// let plan = estimate(&TransformerConfig::small(), &workload)?;
/// assert_eq!(plan.parameter_bytes, 4 * 128_625_408);
/// assert!(plan.peak_bytes > 4 * plan.parameter_bytes);
///
/// // Flash attention keeps 12 layers of (4, 12, 256) in place of (4, 12, 256, 256).
/// let flash = Workload { attention: Algorithm::Flash, ..workload };
/// let saved_bytes = plan.activation_bytes - estimate(&TransformerConfig::small(), &flash)?.activation_bytes;
/// assert_eq!(saved_bytes, 4 * 12 * 4 * 12 * 256 * (256 - 1));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A configuration that is no model's, or not one of the workload's attention.
pub fn estimate(config: &TransformerConfig, workload: &Workload) -> Result<Estimate> {
    let config = &TransformerConfig {
        attention: workload.attention,
        ..config.clone()
    };
    config.validate()?;
    let size = |n: usize| n as f64; // exact to 2^53, and no overflow beyond
    let (d, f, v) = (
        size(config.d_model),
        size(config.d_ff),
        size(config.vocab_size),
    );
    let (layers, heads) = (size(config.num_layers), size(config.num_heads));
    let length = size(workload.sequence_length);
    let n = size(workload.batch_size) * length;
    let attention = match workload.attention {
        Algorithm::Naive => n * heads * length, // p
        Algorithm::Flash => n * heads,          // lse
    };
    let parameters = size(config.num_parameters());

    // Norm, projections, split heads, rotated q and k, heads out, merged, projected, two sums, norm, down-projection:
    // 16 of (B, T, D). Gate, up and product: 3 of (B, T, F). Attention's p or lse. rstd of two norms.
    let block = 16.0 * n * d + 3.0 * n * f + attention + 2.0 * n;
    let graph = layers * block + 2.0 * n * d + n;
    let logits = n * v;

    let keeps_graph = workload.mode != Mode::Forward;
    let backward = matches!(workload.mode, Mode::ForwardBackward | Mode::TrainStep);
    let activations = if keeps_graph {
        graph
    } else {
        // Nothing outlives its reader: the widest moment of one block. In attention its input, that normed, q, k, v and
        // the output; in the feed-forward network its input, the first sum, that normed, gate, up and product.
        (6.0 * n * d + attention).max(3.0 * n * d + 3.0 * n * f)
    };
    let gradients = if backward { parameters } else { 0.0 };
    let optimizer = if workload.mode == Mode::TrainStep {
        2.0 * parameters
    } else {
        0.0
    };
    // The moments that count: the logits' gradient (scratch of one op), when no weight has one yet; and, when nearly
    // every weight has one, the first block's gate (scratch too), or the embedding table's own gradient, which exists
    // three times for a moment, since candle adds every gradient to zeros.
    let at_logits = logits + n * d + v * d;
    let at_first_block = gradients + 2.0 * n * d + 3.0 * n * f;
    let at_embedding = gradients + 2.0 * v * d + 3.0 * n * d;
    let beyond = if backward {
        at_logits.max(at_first_block).max(at_embedding)
    } else {
        0.0
    };
    let forward_only = if keeps_graph {
        activations + logits
    } else {
        activations.max(logits + 2.0 * n * d)
    };
    let peak = parameters + optimizer + forward_only + beyond;

    let bytes = |elements: f64| (4.0 * elements) as u64; // saturates
    Ok(Estimate {
        parameter_bytes: bytes(parameters),
        gradient_bytes: bytes(gradients),
        optimizer_bytes: bytes(optimizer),
        activation_bytes: bytes(activations),
        logit_bytes: bytes(logits),
        transient_bytes: bytes((beyond - gradients).max(0.0)),
        peak_bytes: bytes(peak),
    })
}
