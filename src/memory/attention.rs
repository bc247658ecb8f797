//! The memory of attention, from its sizes alone.

use super::{Account, Holds, Kernels};
use crate::attention::{Algorithm, Mask, flash, naive};
use crate::graph::{Room, Target};
use crate::kernels::cpu::{flash_attention, naive_attention};
use crate::kernels::workspace;
use candle_core::DType;

/// One attention, forward and backward: q, k, v (B, H, T, Dh).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionWorkload {
    /// What computes it.
    pub algorithm: Algorithm,
    /// B.
    pub batch_size: usize,
    /// H.
    pub heads: usize,
    /// T.
    pub sequence_length: usize,
    /// Dh.
    pub head_dim: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Of q, k and v.
    pub dtype: DType,
}

/// The attention that CS336 begins with: naive, batch 8, one head of 64, 1,024 tokens, every key seen, in f32.
impl Default for AttentionWorkload {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Naive,
            batch_size: 8,
            heads: 1,
            sequence_length: 1024,
            head_dim: 64,
            mask: Mask::Full,
            dtype: DType::F32,
        }
    }
}

impl AttentionWorkload {
    /// N: the elements of one of q, k, v and out.
    fn elements(&self) -> f64 {
        self.rows() * self.head_dim as f64
    }

    /// B H T.
    fn rows(&self) -> f64 {
        self.matrices() * self.sequence_length as f64
    }

    /// B H.
    fn matrices(&self) -> f64 {
        self.batch_size as f64 * self.heads as f64
    }

    /// B H T^2.
    fn scores(&self) -> f64 {
        self.rows() * self.sequence_length as f64
    }

    /// Scores and probabilities B H T^2 each and the output, as CS336's handout counts: what composed ops would keep.
    /// [`attention_account`] says what the implementation here does keep.
    pub fn composed_bytes(&self) -> u64 {
        ((2.0 * self.scores() + self.elements()) * self.dtype.size_in_bytes() as f64) as u64
    }
}

/// What one attention holds at its worst moment, with its inputs, where `kernels` compute it: predicted, for deciding whether
/// it fits.
///
/// Naive overwrites its scores with the probabilities, so they exist once. On the CPU its backward takes a matrix of
/// (T, T) for each of B H, one a thread at a time; in half precision the probabilities are f32 all the same, and a head
/// is widened while it is worked on; products pack blocks of their factors, a few MiB whatever the sizes. On a card
/// probabilities are in the dtype of q, k and v, and backward takes matrices of (T, T) for as many of B H as 1 GiB
/// holds in f32, one at least; in half precision forward and backward as many as 32 MiB hold in f32, and backward half
/// as much again.
///
/// Flash keeps the log-sum-exp instead, two numbers a row, one in half precision; its backward takes a few tiles a
/// thread, and where dq is rounded its sums for two heads a thread, on a card for all of them. After any of them,
/// candle adds each gradient to zeros.
///
/// ```
/// use tallow::memory::{AttentionWorkload, Kernels, attention_account};
///
/// let workload = AttentionWorkload { sequence_length: 16_384, ..Default::default() };
/// let [cpu, card] = [Kernels::Cpu, Kernels::Cuda].map(|kernels| attention_account(&workload, kernels));
/// assert_eq!(cpu.before_backward_bytes(), card.before_backward_bytes());
/// assert!(card.peak_bytes() > card.before_backward_bytes() + (1 << 30));
/// ```
pub fn attention_account(workload: &AttentionWorkload, kernels: Kernels) -> Account {
    let width = workload.dtype.size_in_bytes();
    let n = workload.elements();
    let account = Account::new(format!(
        "B {}, H {}, T {}, Dh {}, {width} bytes an element",
        workload.batch_size, workload.heads, workload.sequence_length, workload.head_dim
    ))
    .with(Holds::Inputs, "q, k, v", "3BHTDh", 3.0 * n, width)
    .with(Holds::Activations, "out", "BHTDh", n, width)
    .with(Holds::Scratch, "its gradient", "BHTDh", n, width)
    .with(Holds::Gradients, "dq, dk, dv", "3BHTDh", 3.0 * n, width);
    between(account, workload, kernels)
}

/// Adds what the algorithm keeps between forward and backward, and what backward takes for itself.
pub(super) fn between(account: Account, workload: &AttentionWorkload, kernels: Kernels) -> Account {
    let width = workload.dtype.size_in_bytes();
    let wide = width.max(4); // half precision is computed in f32
    let (scores, n) = (workload.scores(), workload.elements());
    let keep = |account: Account, what, formula, elements, width| {
        account.with(Holds::Activations, what, formula, elements, width)
    };
    let no_kernel = (workload.algorithm, kernels) == (Algorithm::Naive, Kernels::Cuda)
        && workload.dtype == DType::F64;
    let (account, room) = match workload.algorithm {
        Algorithm::Flash => {
            let parts = workspace::flash_lse_parts(workload.dtype);
            let account = keep(account, "log-sum-exp", "BHT", workload.rows(), parts * wide);
            let account = match wide == width {
                true => account,
                false => keep(account, "what rounding took from out", "BHTDh", n, width),
            };
            (account, backward_room(workload, kernels))
        }
        // Scores and probabilities are kept; candle adds the probabilities' gradient to zeros.
        Algorithm::Naive if no_kernel => {
            let account = keep(account, "scores", "BHT^2", scores, width);
            let account = keep(account, "probabilities", "BHT^2", scores, width);
            let room = Room {
                what: "the probabilities' gradient, zeros and sums",
                formula: "5BHT^2",
                elements: 5.0 * scores,
                element_bytes: width,
            };
            (account, room)
        }
        Algorithm::Naive => {
            let kept_width = match kernels {
                Kernels::Cpu => wide,
                Kernels::Cuda => width,
            };
            let account = keep(account, "probabilities", "BHT^2", scores, kept_width);
            (account, backward_room(workload, kernels))
        }
    };
    let storing = 2.0 * n;
    match room.elements * room.element_bytes as f64 > storing * width as f64 {
        true => account.with(
            Holds::Scratch,
            room.what,
            room.formula,
            room.elements,
            room.element_bytes,
        ),
        false => {
            let what = "a gradient's zeros and sum";
            account.with(Holds::Scratch, what, "2BHTDh", storing, width)
        }
    }
}

/// As flash attention's kernels are told.
fn flash_sizes(workload: &AttentionWorkload) -> flash_attention::Sizes {
    flash_attention::Sizes {
        batch: workload.batch_size,
        heads: workload.heads,
        kv_heads: workload.heads.max(1),
        queries: workload.sequence_length,
        keys: workload.sequence_length,
        head_dim: workload.head_dim,
        mask: workload.mask,
        scale: 1.0,
    }
}

/// What the algorithm's backward takes for itself, where there is a kernel.
fn backward_room(workload: &AttentionWorkload, kernels: Kernels) -> Room {
    let (target, dtype) = (kernels.into(), workload.dtype);
    match workload.algorithm {
        Algorithm::Flash => flash::backward_room(&flash_sizes(workload), dtype, target),
        Algorithm::Naive => {
            let matrices = workload.batch_size.saturating_mul(workload.heads);
            let sizes = naive_attention::Sizes {
                batch: matrices,
                kv_batch: matrices,
                queries: workload.sequence_length,
                keys: workload.sequence_length,
                head_dim: workload.head_dim,
                value_dim: workload.head_dim,
            };
            naive::backward_room(&sizes, dtype, target)
        }
    }
}

/// The larger of what flash attention's two passes take for themselves on the CPU.
pub(super) fn flash_room(workload: &AttentionWorkload) -> Room {
    let (sizes, dtype) = (flash_sizes(workload), workload.dtype);
    let backward = flash::backward_room(&sizes, dtype, Target::Cpu);
    let forward = flash::forward_room(&sizes, dtype, Target::Cpu);
    match forward.filter(|forward| forward.elements > backward.elements) {
        Some(forward) => forward,
        None => backward,
    }
}
