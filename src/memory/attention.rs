//! The memory of attention, from its sizes alone.

use super::{Account, Holds, Kernels};
use crate::attention::{Algorithm, Mask};
use crate::kernels::cpu::flash_attention::{
    Sizes, Tiles, backward_scratch_elements, forward_scratch_elements,
};
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};
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
    let (account, (what, formula, scratch, scratch_width)) = match (workload.algorithm, kernels) {
        (Algorithm::Flash, _) => {
            let rows = workload.rows();
            let parts = workspace::flash_lse_parts(workload.dtype);
            let account = keep(account, "log-sum-exp", "BHT", rows, parts * wide);
            let account = match wide == width {
                true => account,
                false => keep(account, "what rounding took from out", "BHTDh", n, width),
            };
            let scratch = match kernels {
                Kernels::Cpu => {
                    let [_, elements] = flash_scratch(workload);
                    ("delta, dq's sums, tiles", "BHT + ..", elements, wide)
                }
                Kernels::Cuda => {
                    let words = flash_backward_on_card(workload);
                    ("delta, dq's sums", "BH(T + ..)(Dh + ..)", words, 4)
                }
            };
            (account, scratch)
        }
        (Algorithm::Naive, Kernels::Cpu) => {
            let [_, elements] = naive_scratch(workload);
            let scratch = ("scores' gradient, one a thread", "T^2", elements, wide);
            let account = keep(account, "probabilities", "BHT^2", scores, wide);
            (account, scratch)
        }
        // No kernel there: scores and probabilities are kept; candle adds the probabilities' gradient to zeros.
        (Algorithm::Naive, Kernels::Cuda) if workload.dtype == DType::F64 => {
            let scratch = (
                "the probabilities' gradient, zeros and sums",
                "5BHT^2",
                5.0 * scores,
                width,
            );
            let account = keep(account, "scores", "BHT^2", scores, width);
            let account = keep(account, "probabilities", "BHT^2", scores, width);
            (account, scratch)
        }
        (Algorithm::Naive, Kernels::Cuda) => {
            let elements = naive_scores_on_card(workload);
            let name = "scores' gradients of some heads";
            let scratch = (
                name,
                "..T^2",
                elements,
                naive_backward_width(workload.dtype),
            );
            let account = keep(account, "probabilities", "BHT^2", scores, width);
            (account, scratch)
        }
    };
    let storing = 2.0 * n;
    match scratch * scratch_width as f64 > storing * width as f64 {
        true => account.with(Holds::Scratch, what, formula, scratch, scratch_width),
        false => {
            let what = "a gradient's zeros and sum";
            account.with(Holds::Scratch, what, "2BHTDh", storing, width)
        }
    }
}

/// Elements that naive's forward and its backward take for themselves: backward a matrix of (T, T), both what half
/// precision is widened to, head by head, and what products pack.
pub(super) fn naive_scratch(workload: &AttentionWorkload) -> [f64; 2] {
    let (t, threads) = (workload.sequence_length, rayon::current_num_threads());
    // As the kernel shares its matrices out.
    let (at_once, inside) = match workload.matrices() < 2.0 * threads as f64 {
        true => (1.0, Threads::All),
        false => (threads as f64, Threads::One),
    };
    let width = workload.dtype.size_in_bytes();
    let head_dim = workload.head_dim;
    // q, k, v and out before it is rounded; q, k, v, dout, and dq, dk, dv before they are rounded.
    let widened = match width < 4 {
        true => t as f64 * head_dim as f64,
        false => 0.0,
    };
    let packed = |depth, cols, a_transposed, b_transposed| {
        let sizes = ProductSizes {
            rows: t,
            depth,
            cols,
            a_transposed,
            b_transposed,
            element_bytes: width.max(4),
        };
        packing_bytes(sizes, inside) / width.max(4) as f64
    };
    let scores = packed(head_dim, t, false, true); // q k^T, dout v^T
    let values = packed(t, head_dim, false, false); // p v, ds k
    let gradients = packed(t, head_dim, true, false); // p^T dout, ds^T q
    let forward = scores.max(values);
    [
        at_once * (4.0 * widened + forward),
        at_once * (t as f64 * t as f64 + 7.0 * widened + forward.max(gradients)),
    ]
}

/// Elements that flash's forward and its backward take for themselves: tiles, delta, and the dq that is not written in
/// place.
pub(super) fn flash_scratch(workload: &AttentionWorkload) -> [f64; 2] {
    let sizes = flash_sizes(workload);
    let tiles = Tiles::for_head_dim(workload.head_dim);
    [
        forward_scratch_elements(&sizes, &tiles),
        backward_scratch_elements(&sizes, &tiles, workload.dtype.size_in_bytes()),
    ]
}

/// Bytes of each score that naive's backward has on a card: of the probability's gradient and, in half precision, of
/// its own.
pub(super) fn naive_backward_width(dtype: DType) -> usize {
    match dtype.size_in_bytes() {
        half @ ..4 => 4 + half,
        width => width,
    }
}

/// The scores that naive has on a card at once beside the probabilities.
pub(super) fn naive_scores_on_card(workload: &AttentionWorkload) -> f64 {
    let heads = workload.batch_size.saturating_mul(workload.heads);
    let t = workload.sequence_length;
    let of_head = t.saturating_mul(t);
    let at_once = workspace::naive_heads_at_once(heads, of_head, workload.dtype);
    at_once as f64 * of_head as f64
}

/// What flash's backward takes on a card, in words.
pub(super) fn flash_backward_on_card(workload: &AttentionWorkload) -> f64 {
    workspace::flash_backward(&flash_sizes(workload)) as f64
}

fn flash_sizes(workload: &AttentionWorkload) -> Sizes {
    Sizes {
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
