//! Memory of attention alone, and of the self-attention layer. Forward is traced, and the trace is followed through
//! backward.

use super::letters::{Letter, Letters, other_head_dim};
use super::lifetimes::{Buffer, Lifetimes, elements};
use super::{MemoryBreakdown, MemoryKind, Mode, Target};
use crate::attention::{Algorithm, AttentionConfig, FirstKeys, Mask};
use crate::grad::with_grad;
use crate::graph::{self, Graph};
use crate::nn::{Attention, AttentionLayerConfig};
use crate::ops::{KernelPolicy, check_size, with_kernel_policy};
use crate::precision::{Precision, outside};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// The sizes of one attention, forward and backward: q, k, v (B, H, T, Dh).
///
/// [`attention_breakdown`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionWorkload {
    /// The algorithm that computes it.
    pub algorithm: Algorithm,
    /// Batch size B.
    pub batch_size: usize,
    /// Number of heads H.
    pub heads: usize,
    /// Sequence length T.
    pub sequence_length: usize,
    /// Width of a head, Dh.
    pub head_dim: usize,
    /// The mask: the keys that each query attends to.
    pub mask: Mask,
    /// Number of documents packed into a sequence, of lengths as equal as possible; each attends only to itself. 1
    /// means that the sequence is not packed. At most T: larger numbers count as T.
    pub documents: usize,
    /// Dtype of q, k and v.
    pub dtype: DType,
}

/// The attention that CS336 begins with: naive, batch 8, one head of width 64, 1,024 tokens, no mask, f32.
impl Default for AttentionWorkload {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Naive,
            batch_size: 8,
            heads: 1,
            sequence_length: 1024,
            head_dim: 64,
            mask: Mask::Full,
            documents: 1,
            dtype: DType::F32,
        }
    }
}

impl AttentionWorkload {
    fn shape(&self) -> [usize; 4] {
        [
            self.batch_size,
            self.heads,
            self.sequence_length,
            self.head_dim,
        ]
    }

    /// Returns the sizes as text, for breakdowns.
    pub(super) fn sizes(&self) -> String {
        let [b, h, t, dh] = self.shape();
        let width = self.dtype.size_in_bytes();
        format!("B {b}, H {h}, T {t}, Dh {dh}, {width} bytes an element")
    }

    fn scores(&self) -> f64 {
        let [b, h, t, _] = self.shape();
        elements(&[b, h, t, t])
    }

    pub(super) fn largest(&self) -> f64 {
        match self.algorithm {
            Algorithm::Naive => self.scores().max(elements(&self.shape())),
            Algorithm::Flash => elements(&self.shape()),
        }
    }

    /// Runs forward on q, k and v that are weights, to be traced.
    pub(super) fn forward(&self) -> Result<Tensor> {
        let leaves = graph::weights(self.dtype);
        let [q, k, v] = ["q", "k", "v"].map(|name| leaves.get(&self.shape(), name));
        let meta = || FirstKeys::meta(self.batch_size, self.sequence_length); // uses no memory
        self.algorithm
            .attend(&q?, &k?, &v?, &self.config_with(meta)?)
    }

    /// Returns the configuration of the attention: first keys if there are several documents, on the CPU.
    ///
    /// # Errors
    /// [`Error::Config`] for 0 documents, or for sequences too long for u32 first keys; [`Error::OutOfMemory`] and
    /// [`Error::Shape`] for first keys that do not fit in memory.
    pub fn config(&self) -> Result<AttentionConfig> {
        self.config_with(|| self.first_keys())
    }

    fn config_with(
        &self,
        first_keys: impl FnOnce() -> Result<FirstKeys>,
    ) -> Result<AttentionConfig> {
        if self.documents == 0 {
            return Err(Error::config("AttentionWorkload", "documents", 0)
                .must_be("at least 1", "1 is a sequence that is not packed"));
        }
        let first_keys = (self.documents > 1).then(first_keys);
        Ok(AttentionConfig {
            mask: self.mask,
            first_keys: first_keys.transpose()?,
            ..Default::default()
        })
    }

    fn first_keys(&self) -> Result<FirstKeys> {
        let [batch, _, length, _] = self.shape();
        if u32::try_from(length).is_err() {
            return Err(
                Error::config("AttentionWorkload", "sequence_length", length).must_be(
                    format!("at most {}, where several documents are packed", u32::MAX),
                    "first keys are u32",
                ),
            );
        }
        const OP: &str = "AttentionWorkload::config";
        check_size(OP, &[batch, length], DType::U32, &Device::Cpu)?;
        let documents = self.documents.clamp(1, length.max(1));
        let begin = |document: usize| document as u64 * length as u64 / documents as u64;
        let lengths = (0..documents).map(|i| (begin(i), begin(i + 1)));
        let sequence = lengths.flat_map(|(from, to)| (from..to).map(move |_| from as u32));
        let sequence = Tensor::from_iter(sequence, &Device::Cpu)?; // (T)
        FirstKeys::new(&sequence.broadcast_as((batch, length))?.contiguous()?)
    }

    /// Returns the two lengths of a sequence's documents, each with the number of documents of that length.
    pub(crate) fn document_lengths(&self) -> [(usize, usize); 2] {
        let length = self.sequence_length;
        let documents = self.documents.clamp(1, length.max(1));
        let (shorter, longer) = (length / documents, length % documents);
        [(shorter, documents - longer), (shorter + 1, longer)]
    }

    /// Returns the bytes of the scores, the probabilities (B H T^2 each) and the output, as CS336's handout counts:
    /// what composed ops would save. [`attention_breakdown`] counts what this crate's implementation saves.
    pub fn composed_bytes(&self) -> u64 {
        let elements = 2.0 * self.scores() + elements(&self.shape());
        (elements * self.dtype.size_in_bytes() as f64) as u64
    }
}

/// Predicts the peak memory of one attention, inputs included, on `kernels`: use it to decide whether a size fits. It
/// follows the trace, as [`estimate_graph`](super::estimate_graph()) does for any function.
///
/// Naive attention saves the probabilities, not the scores. On the CPU each thread holds the keys and values of a head,
/// in backward their gradients too, and the scores of 64 queries. Where there are few heads, each part of a head has
/// sums of its own. Probabilities are f32 even in half precision. On a GPU probabilities have the dtype of q, k and v.
/// In f32, backward there needs (T, T) matrices for up to B H heads, as many as fit in 1 GiB, at least one. In half
/// precision, forward needs f32 matrices for as many heads as fit in 32 MiB, and backward 1.5 times that.
///
/// Flash attention saves the log-sum-exp instead: two numbers a row, one in half precision. Its backward needs a few
/// tiles a thread. Where dq is rounded, it also needs f32 sums of dq: for two heads a thread on the CPU, for all heads
/// on a GPU.
///
/// A GPU has no kernels in f64. Naive is then composed of candle's ops, which use more than twice what this counts.
///
/// ```
/// use tallow::memory::{AttentionWorkload, Target, attention_breakdown};
///
/// let workload = AttentionWorkload { sequence_length: 16_384, ..Default::default() };
/// let cpu = attention_breakdown(&workload, Target::Cpu)?;
/// let gpu = attention_breakdown(&workload, Target::Cuda)?;
/// assert_eq!(cpu.before_backward_bytes, gpu.before_backward_bytes);
/// assert!(gpu.peak_bytes() > gpu.before_backward_bytes + (1 << 30));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Sizes that the algorithm does not support: heads too wide for flash, a Dh of 0, a dtype that is not a float.
pub fn attention_breakdown(
    workload: &AttentionWorkload,
    kernels: Target,
) -> Result<MemoryBreakdown> {
    let w = workload;
    let shape @ [b, h, t, dh] = w.shape();
    let (head_dim, of_head_dim) = other_head_dim(dh);
    breakdown(LayerEstimate {
        workload: w,
        forward: AttentionWorkload::forward,
        kernels,
        residents: vec![Buffer::new(
            MemoryKind::Inputs,
            "q, k, v",
            "3BHTDh",
            3.0 * elements(&shape),
            w.dtype.size_in_bytes(),
        )],
        largest: w.largest(),
        letters: vec![
            Letter::new("B", b, &[(3, 1)]),
            Letter::new("H", h, &[(7, 1)]),
            Letter::new("T", t, &[(5, 1)]),
            Letter::new("Dh", dh, &[of_head_dim]),
        ],
        other: AttentionWorkload {
            batch_size: b.saturating_mul(3),
            heads: h.saturating_mul(7),
            sequence_length: t.saturating_mul(5),
            head_dim,
            ..*w
        },
        sizes: w.sizes(),
    })
}

/// The sizes of one causal [`Attention`](crate::nn::Attention) without positions, forward and backward: x (B, T, D).
///
/// [`self_attention_breakdown`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfAttentionWorkload {
    /// The algorithm that computes attention.
    pub algorithm: Algorithm,
    /// Batch size B.
    pub batch_size: usize,
    /// Sequence length T.
    pub sequence_length: usize,
    /// Model width D.
    pub d_model: usize,
    /// Number of heads H.
    pub heads: usize,
    /// Dtype of weights and inputs.
    pub dtype: DType,
    /// The autocast region that forward runs in; f32 means none.
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
    /// Returns the same sizes in `precision`: weights and input in its parameter dtype, forward in its region.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self {
            dtype: precision.parameter_dtype(),
            precision,
            ..self
        }
    }

    /// Returns the sizes of the attention inside the layer.
    pub fn attention(&self) -> AttentionWorkload {
        AttentionWorkload {
            algorithm: self.algorithm,
            batch_size: self.batch_size,
            heads: self.heads,
            sequence_length: self.sequence_length,
            head_dim: self.d_model / self.heads.max(1),
            mask: Mask::Causal,
            documents: 1,
            dtype: self.compute_dtype(),
        }
    }

    /// Returns the configuration of the layer.
    pub(crate) fn layer_config(&self) -> AttentionLayerConfig {
        AttentionLayerConfig {
            d_model: self.d_model,
            num_heads: self.heads,
            mask: Mask::Causal,
            ..Default::default()
        }
    }

    /// Returns the layer with meta weights, and its input, to be traced.
    pub(super) fn layer(&self) -> Result<(Attention, Tensor)> {
        let shape = (self.batch_size, self.sequence_length, self.d_model);
        let weights = graph::weights(self.dtype);
        let layer = Attention::new(&self.layer_config(), None, weights)?;
        let x = graph::input("x", shape, self.dtype)?;
        Ok((layer.with_attention(self.algorithm), x))
    }

    fn forward(&self) -> Result<Tensor> {
        let (layer, x) = self.layer()?;
        self.precision.run(|| layer.forward(&x))
    }

    /// Returns the number of elements of the weights, of x, and of the largest tensor.
    pub(super) fn elements(&self) -> [f64; 3] {
        let [b, t, d] = [self.batch_size, self.sequence_length, self.d_model];
        let (weight, x) = (elements(&[d, d]), elements(&[b, t, d]));
        [
            4.0 * weight,
            x,
            weight.max(x).max(self.attention().largest()),
        ]
    }

    /// Returns the dtype that projections and attention compute in; a region leaves f64 alone.
    pub(crate) fn compute_dtype(&self) -> DType {
        match self.precision.policy() {
            Some(_) if self.dtype != DType::F64 => self.precision.dtype(),
            _ => self.dtype,
        }
    }
}

/// Predicts the peak memory of one self-attention layer on these kernels, weights and input included: use it to decide
/// whether a size fits. It follows the trace, as [`estimate_graph`](super::estimate_graph()) does for any function.
///
/// The peak is in the backward of attention or, where D is large compared with B T, in that of the last weight, when
/// the gradients of the other three exist already. In an autocast region weights, x and the weights' gradients are f32,
/// and half-precision copies of weights and x exist in addition.
///
/// ```
/// use tallow::memory::{SelfAttentionWorkload, Target, self_attention_breakdown};
///
/// let workload = SelfAttentionWorkload { d_model: 4096, ..Default::default() };
/// let breakdown = self_attention_breakdown(&workload, Target::Cuda)?;
/// assert!(breakdown.to_string().contains("weights 4D^2 256.0 MiB"));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Sizes that the layer does not support: a D that H does not divide, heads too wide for flash.
pub fn self_attention_breakdown(
    workload: &SelfAttentionWorkload,
    kernels: Target,
) -> Result<MemoryBreakdown> {
    let w = workload;
    let [b, t, d, h] = [w.batch_size, w.sequence_length, w.d_model, w.heads];
    let attention = w.attention();
    let width = w.dtype.size_in_bytes();
    let resident =
        |kind, what, formula, elements| Buffer::new(kind, what, formula, elements, width);
    let [weights, x, largest] = w.elements();
    let width = attention.dtype.size_in_bytes();
    let dh = attention.head_dim;
    let (head_dim, of_head_dim) = other_head_dim(dh);
    breakdown(LayerEstimate {
        workload: w,
        forward: SelfAttentionWorkload::forward,
        kernels,
        residents: vec![
            resident(MemoryKind::Weights, "weights", "4D^2", weights),
            resident(MemoryKind::Inputs, "x", "BTD", x),
        ],
        largest,
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

struct LayerEstimate<'a, W> {
    workload: &'a W,
    forward: fn(&W) -> Result<Tensor>,
    kernels: Target,
    residents: Vec<Buffer>,
    largest: f64,
    letters: Vec<Letter>,
    other: W,
    sizes: String,
}

/// Returns the peak memory of a layer's forward and backward.
///
/// # Errors
/// Those of forward.
fn breakdown<W>(layer: LayerEstimate<'_, W>) -> Result<MemoryBreakdown> {
    let of = |workload: &W| traced(layer.kernels, true, || (layer.forward)(workload));
    let is_addressable =
        |times: f64| layer.largest * times * (size_of::<f64>() as f64) < isize::MAX as f64;
    let (graph, letters, lifetimes) = if is_addressable(1.0) {
        let graph = of(layer.workload)?;
        let other = is_addressable(MOST_SCALED).then(|| of(&layer.other).ok());
        let letters = Letters::new(&graph, layer.letters, other.flatten());
        let lifetimes = Lifetimes::of(&graph, Mode::ForwardBackward, layer.residents, None);
        (graph, letters, lifetimes)
    } else {
        let lifetimes = Lifetimes::beyond(layer.residents);
        (Graph::default(), Letters::default(), lifetimes)
    };
    let mut breakdown = letters.breakdown(&graph, layer.sizes, &lifetimes);
    for part in &mut breakdown.terms {
        if part.kind == MemoryKind::Logits {
            part.kind = MemoryKind::Activations; // a layer has no logits
        }
    }
    Ok(breakdown)
}

/// How much larger a tensor of `other` can be: naive attention's scores, B H T^2, grow by 3 * 7 * 5^2, and at most 4
/// times more for heads of odd width.
const MOST_SCALED: f64 = 2100.0;

/// Returns the graph of `forward` on these kernels, whatever autocast region or kernel policy the caller is in.
pub(super) fn traced(
    kernels: Target,
    keeps_graph: bool,
    forward: impl FnOnce() -> Result<Tensor>,
) -> Result<Graph> {
    let traced = || graph::trace(kernels, forward);
    let with_kernels = || with_kernel_policy(KernelPolicy::Prefer, traced);
    outside(|| with_grad(keeps_graph, with_kernels))
}
