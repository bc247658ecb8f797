//! What a call does: the operations of a plan, with their sizes, and what they cost.

use super::sizes::{AttentionSizes, HeadAttentionSizes};
use crate::ops::lowering::Kernel;

/// Whether a product is added to what its output holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulate {
    /// It is overwritten.
    #[default]
    Never,
    /// Overwritten by the first micro-batch, added to by the others.
    AfterFirst,
    /// Added to.
    Always,
}

impl Accumulate {
    /// Whether to add, in micro-batch `micro_batch` of a step.
    pub fn adds(self, micro_batch: usize) -> bool {
        match self {
            Self::Never => false,
            Self::AfterFirst => micro_batch > 0,
            Self::Always => true,
        }
    }
}

/// An operation, and its sizes. A call has its operands by the names in `code` here, in this order; what is
/// written in place is among the writes alone. N is rows, D width.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// A kernel that an op brings along. Operands as the op's lowering names them.
    Kernel(Kernel),
    /// A copy in another dtype. Reads `x`; writes `y`.
    Cast {
        /// Of each.
        elements: usize,
    },
    /// Rows of a table by id. Reads `ids` (N), `table` (V, D); writes `x` (N, D).
    Embedding {
        /// N.
        rows: usize,
        /// D.
        width: usize,
    },
    /// Reads `x` (N, D), `weight` (D) and, on a GPU where what is normed is a sum that did not stay, the `branch` that
    /// is added to x (N, D); writes `y` (N, D), `rstd` (N).
    RmsNorm {
        /// N.
        rows: usize,
        /// D.
        width: usize,
        /// What is added under the root.
        eps: f64,
    },
    /// The norm of a sum. Reads `x` (N, D), `branch` (N, D), `weight` (D); writes `sum`, x + branch (N, D), `y` (N, D),
    /// `rstd` (N).
    AddRmsNorm {
        /// N.
        rows: usize,
        /// D.
        width: usize,
        /// What is added under the root.
        eps: f64,
    },
    /// `c = a b`. Reads `a` and `b`, as they lie (rows, depth) and (depth, cols), or the other way round where they are
    /// transposed; writes `c` (rows, cols).
    Matmul {
        /// Of c.
        rows: usize,
        /// Of c.
        cols: usize,
        /// What is summed over.
        depth: usize,
        /// Whether a lies as (depth, rows).
        a_transposed: bool,
        /// Whether b lies as (cols, depth), as weights do.
        b_transposed: bool,
        /// Whether c is added to.
        accumulate: Accumulate,
    },
    /// Rotates heads to their positions, in place. Reads `cos`, `sin` (T, Dh/2); writes `x` (B, T, H*Dh), or q and k of
    /// what is packed.
    Rotate(AttentionSizes),
    /// Rotates gradients of rotated heads back, in place. Operands as [`Rotate`](Self::Rotate).
    RotateBack(AttentionSizes),
    /// Naive attention with q and k rotated. Reads `q`, `k`, `v` (B, T, H*Dh), `cos`, `sin` (T, Dh/2); writes `out` (B,
    /// T, H*Dh), `scratch` and, where backward wants it, `p` (its triangle).
    Attention(AttentionSizes),
    /// Naive attention on a GPU. Reads `q`, `k` (rotated), `v`, or all three as `qkv` where they are packed; writes
    /// `out` (B, T, H*Dh), the probabilities `p` (B, H, T, T) and, in half precision, the `scores` of some heads (..,
    /// T, T) in f32.
    NaiveAttention(AttentionSizes),
    /// Attention in tiles. Reads `q`, `k` (rotated), `v`, or `qkv`; writes `out`, `lse` (parts, B, H, T), on a GPU
    /// `workspace` and, in half precision where backward wants it, `rounding_error`, what rounding took from out (B, H,
    /// T, Dh). out is (B, H, T, Dh) on the CPU; on a GPU (B, T, H*Dh).
    FlashAttention(AttentionSizes),
    /// Reads `x` (B, H, T, Dh); writes `y` (B, T, H*Dh).
    MergeHeads(AttentionSizes),
    /// Reads `gate`, `up` (N, F); writes `y`, silu(gate) * up (N, F).
    SwiGlu {
        /// N F.
        elements: usize,
    },
    /// The same of what lies side by side. Reads `gate_up` (N, 2 F); writes `y`, silu(gate) * up (N, F).
    PackedSwiGlu {
        /// N.
        rows: usize,
        /// F.
        width: usize,
    },
    /// Loss and gradient of some rows. Reads `targets` (rows); writes `logits` (rows, V), which become their gradient,
    /// and `losses` (rows).
    CrossEntropy {
        /// Rows of this call.
        rows: usize,
        /// V.
        classes: usize,
        /// Rows of the whole step, which the loss is the mean of.
        counted: usize,
    },
    /// The gradient of a loss that no op differentiates at once. Writes `dloss` (1): the loss scale over how many
    /// losses a step is the mean of.
    LossGradient {
        /// How many.
        counted: usize,
    },
    /// Reads `x`; writes `y`, which x is copied or added to. Both in f32.
    Accumulate {
        /// Of each.
        elements: usize,
        /// Whether x is added.
        accumulate: Accumulate,
    },
    /// The rows' share of the mean loss. Reads `losses` (N); writes `loss` (1).
    MeanLoss {
        /// N.
        rows: usize,
        /// Rows of the whole step.
        counted: usize,
        /// Whether the loss is added to.
        accumulate: Accumulate,
    },
    /// Writes `dy` (N, F), which becomes silu(gate) * up, `gate`, which becomes dgate, `up`, which becomes dup.
    SwiGluBackward {
        /// N F.
        elements: usize,
    },
    /// Writes `dy` (N, F), which becomes silu(gate) * up, and `gate_up` (N, 2 F), which become their gradients.
    PackedSwiGluBackward {
        /// N.
        rows: usize,
        /// F.
        width: usize,
    },
    /// Reads `d_out`, `q`, `k`, `v` (B, T, H*Dh), `p`, `cos`, `sin`; writes `dq`, `dk`, `dv` (B, T, H*Dh), `scratch`.
    AttentionBackward(AttentionSizes),
    /// Reads `d_out` (B, T, H*Dh), `q`, `k`, `v`, or `qkv`, the probabilities `p` (B, H, T, T); writes `dq`, `dk`,
    /// `dv`, or `dqkv`, as those lie, not rotated back, `dp` of some heads (.., T, T) in f32 and, in half precision,
    /// `dscores` of them (.., T, T).
    NaiveAttentionBackward(AttentionSizes),
    /// Reads `d_out`, `q`, `k`, `v`, or `qkv`, `out` (B, T, H*Dh), `lse` (parts, B, H, T) and, in half precision,
    /// `rounding_error` (B, H, T, Dh); writes `dq`, `dk`, `dv`: (B, H, T, Dh) on the CPU; on a GPU as q, k and v lie,
    /// and `workspace`.
    FlashAttentionBackward(AttentionSizes),
    /// Reads `x` (B, H, T, Dh), `cos`, `sin`; writes `y` (B, T, H*Dh), rotated back.
    MergeRotatedBack(AttentionSizes),
    /// Reads `x` (N, D), `weight` (D), `rstd` (N) and, on a GPU where x is not the sum that was normed, the `branch`
    /// that was added to it (N, D); writes `dy` (N, D), which becomes the norm's output, `dx` (N, D), `dweight` (D),
    /// `partials` and, on a GPU where the next product wants it, `copy`, which is dx in half precision.
    RmsNormBackward {
        /// N.
        rows: usize,
        /// D.
        width: usize,
        /// Whether dx is added to.
        add_dx: bool,
        /// Whether dweight is added to.
        accumulate: Accumulate,
    },
    /// Reads `dx` (N, D), `ids` (N); writes `dtable` (V, D) and, on a GPU, `workspace`.
    EmbeddingBackward {
        /// N.
        rows: usize,
        /// D.
        width: usize,
        /// Whether dtable is added to.
        accumulate: Accumulate,
    },
    /// A gradient over the loss scale. Writes `gradient`, in place, and `found` (1): whether all of it is finite; on a
    /// GPU, whether it is not.
    Unscale {
        /// Of the gradient.
        elements: usize,
    },
    /// Reads what was `found` of the gradients (P); writes `first` (1), the number of the first that is not finite, P
    /// if all are. Where one is not, the step ends here; on a GPU the updates are told to change nothing, by `factor`
    /// (3).
    CheckOverflow {
        /// P.
        parameters: usize,
    },
    /// Naive attention on heads one after another. Reads `q`, `k`, `v` (B H, T, Dh); writes `out` (B H, T, Dh),
    /// `exponentials` of the scores (as the mask leaves them; for bf16 in f16), `inv_row_sum` (B H, T), in half
    /// precision `rounding_error`, what rounding took from out (B H, T, Dh), and `scratch`. On the CPU.
    HeadAttention(HeadAttentionSizes),
    /// Reads `d_out`, `q`, `k`, `v`, `out` (B H, T, Dh) and what forward left: `exponentials`, `inv_row_sum` and, in
    /// half precision, `rounding_error`; writes `dq`, `dk`, `dv` (B H, T, Dh), `partial_sums`, `scratch`.
    HeadAttentionBackward(HeadAttentionSizes),
    /// Reads `x`; writes `square`, the sum of its squares (1) and, on a GPU, those of its `chunks`.
    SumOfSquares {
        /// Of x.
        elements: usize,
    },
    /// Reads the sums of `squares` (P); writes `factor` (2), the norm and what clipping multiplies the gradients by; on
    /// a GPU also which gradient is not finite, if one is (3).
    ClipFactor {
        /// P.
        parameters: usize,
    },
    /// Reads `gradient` and, where gradients are clipped or checked, `factor`; writes `parameter`, `exp_avg`,
    /// `exp_avg_sq` and, on a GPU, the `copy` that products read, where there is one.
    AdamW {
        /// Its number in [`Location::Parameter`](super::Location::Parameter).
        parameter: usize,
        /// How many elements it has.
        elements: usize,
    },
}

impl Op {
    /// As reports call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kernel(kernel) => kernel.name(),
            Self::Cast { .. } => "cast",
            Self::Embedding { .. } => "embedding",
            Self::RmsNorm { .. } => "rms_norm",
            Self::AddRmsNorm { .. } => "add_rms_norm",
            Self::Matmul { .. } => "matmul",
            Self::Rotate(_) => "rotate",
            Self::RotateBack(_) => "rotate_back",
            Self::Attention(_) => "attention",
            Self::NaiveAttention(_) => "naive_attention",
            Self::FlashAttention(_) => "flash_attention",
            Self::MergeHeads(_) => "merge_heads",
            Self::SwiGlu { .. } | Self::PackedSwiGlu { .. } => "swiglu",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::LossGradient { .. } => "loss_gradient",
            Self::Accumulate { .. } => "accumulate",
            Self::MeanLoss { .. } => "mean_loss",
            Self::SwiGluBackward { .. } | Self::PackedSwiGluBackward { .. } => "swiglu_backward",
            Self::AttentionBackward(_) => "attention_backward",
            Self::NaiveAttentionBackward(_) => "naive_attention_backward",
            Self::FlashAttentionBackward(_) => "flash_attention_backward",
            Self::MergeRotatedBack(_) => "merge_rotated_back",
            Self::RmsNormBackward { .. } => "rms_norm_backward",
            Self::EmbeddingBackward { .. } => "embedding_backward",
            Self::Unscale { .. } => "unscale",
            Self::CheckOverflow { .. } => "check_overflow",
            Self::HeadAttention(_) => "head_attention",
            Self::HeadAttentionBackward(_) => "head_attention_backward",
            Self::SumOfSquares { .. } => "sum_of_squares",
            Self::ClipFactor { .. } => "clip_factor",
            Self::AdamW { .. } => "adamw",
        }
    }

    /// Whether a GPU has a kernel for it.
    pub fn is_on_gpu(&self) -> bool {
        match self {
            Self::Kernel(kernel) => kernel.is_on_gpu(),
            Self::LossGradient { counted } => *counted == 1, // which is the loss scale
            Self::Attention(_) | Self::AttentionBackward(_) => false,
            Self::HeadAttention(_) | Self::HeadAttentionBackward(_) => false,
            Self::MergeHeads(_) | Self::MergeRotatedBack(_) => false,
            _ => true,
        }
    }

    /// Whether it is a matrix product and nothing else.
    pub fn is_product(&self) -> bool {
        match self {
            Self::Matmul { .. } => true,
            Self::Kernel(kernel) => kernel.name() == "matmul",
            _ => false,
        }
    }

    /// FLOPs of its matrix products: the model's work, as [`flops`](crate::model::flops) counts it, whatever the kernel
    /// leaves out or does twice.
    pub fn flops(&self) -> f64 {
        let attention = |sizes: &AttentionSizes| {
            let [b, t, h, d] =
                [sizes.batch, sizes.length, sizes.heads, sizes.head_dim].map(|n| n as f64);
            4.0 * b * h * t * t * d
        };
        let of_heads = |sizes: &HeadAttentionSizes| {
            let [m, t, d] = [sizes.matrices, sizes.length, sizes.head_dim].map(|n| n as f64);
            4.0 * m * t * t * d
        };
        match self {
            Self::Matmul {
                rows, cols, depth, ..
            } => 2.0 * *rows as f64 * *cols as f64 * *depth as f64,
            Self::Kernel(kernel) => kernel.flops(),
            Self::Attention(sizes) | Self::NaiveAttention(sizes) | Self::FlashAttention(sizes) => {
                attention(sizes)
            }
            Self::AttentionBackward(sizes)
            | Self::NaiveAttentionBackward(sizes)
            | Self::FlashAttentionBackward(sizes) => 2.0 * attention(sizes),
            Self::HeadAttention(sizes) => of_heads(sizes),
            Self::HeadAttentionBackward(sizes) => 2.0 * of_heads(sizes),
            _ => 0.0,
        }
    }

    /// Whether what it writes first is also read: what is added to or changed in place.
    pub fn reads_what_it_writes(&self) -> bool {
        match self {
            Self::Matmul { accumulate, .. } | Self::Accumulate { accumulate, .. } => {
                *accumulate != Accumulate::Never
            }
            Self::RmsNormBackward { .. } | Self::CrossEntropy { .. } => true,
            Self::Rotate(_) | Self::RotateBack(_) => true,
            Self::SwiGluBackward { .. } | Self::PackedSwiGluBackward { .. } => true,
            Self::AdamW { .. } | Self::Unscale { .. } => true,
            _ => false,
        }
    }

    /// The sizes, as `explain` prints them.
    pub fn sizes(&self) -> String {
        let attention = |s: &AttentionSizes| {
            format!("B{} T{} H{} Dh{}", s.batch, s.length, s.heads, s.head_dim)
        };
        match self {
            Self::Kernel(kernel) => {
                let attributes = kernel.attributes().iter();
                let sizes: Vec<String> = attributes.map(|(k, v)| format!("{k} {v}")).collect();
                sizes.join(", ")
            }
            Self::Embedding { rows, width }
            | Self::RmsNorm { rows, width, .. }
            | Self::AddRmsNorm { rows, width, .. }
            | Self::RmsNormBackward { rows, width, .. }
            | Self::PackedSwiGlu { rows, width }
            | Self::PackedSwiGluBackward { rows, width }
            | Self::EmbeddingBackward { rows, width, .. } => format!("{rows} x {width}"),
            Self::Matmul {
                rows,
                cols,
                depth,
                a_transposed,
                b_transposed,
                accumulate,
            } => format!(
                "{rows} x {depth}{} * {depth} x {cols}{}{}",
                if *a_transposed { "^T" } else { "" },
                if *b_transposed { "^T" } else { "" },
                match accumulate {
                    Accumulate::Never => "",
                    Accumulate::AfterFirst => ", += from the second micro-batch",
                    Accumulate::Always => ", +=",
                }
            ),
            Self::Rotate(sizes)
            | Self::RotateBack(sizes)
            | Self::Attention(sizes)
            | Self::NaiveAttention(sizes)
            | Self::FlashAttention(sizes)
            | Self::MergeHeads(sizes)
            | Self::AttentionBackward(sizes)
            | Self::NaiveAttentionBackward(sizes)
            | Self::FlashAttentionBackward(sizes)
            | Self::MergeRotatedBack(sizes) => attention(sizes),
            Self::HeadAttention(s) | Self::HeadAttentionBackward(s) => {
                format!(
                    "BH{} T{} Dh{} {:?}",
                    s.matrices, s.length, s.head_dim, s.mask
                )
            }
            Self::CrossEntropy { rows, classes, .. } => format!("{rows} x {classes}"),
            Self::MeanLoss { rows, .. } => format!("{rows}"),
            Self::LossGradient { .. } => "1".into(),
            Self::SwiGlu { elements }
            | Self::SwiGluBackward { elements }
            | Self::Cast { elements }
            | Self::Unscale { elements }
            | Self::SumOfSquares { elements }
            | Self::Accumulate { elements, .. }
            | Self::AdamW { elements, .. } => format!("{elements}"),
            Self::CheckOverflow { parameters } | Self::ClipFactor { parameters } => {
                format!("{parameters}")
            }
        }
    }
}
