//! The memory of attention, from its sizes alone.

use super::{Account, Holds};
use crate::attention::{Algorithm, Mask};
use crate::kernels::cpu::flash_attention::{
    Sizes, Tiles, backward_scratch_elements, forward_scratch_elements,
};
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};
use crate::kernels::workspace;
use candle_core::{DType, Device};

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

/// What one attention holds on the CPU at its worst moment, with its inputs: predicted, for deciding whether it fits.
///
/// Naive overwrites its scores with the probabilities, so they exist once; its backward takes a matrix of (T, T) for
/// each of B H, one a thread at a time. In half precision the probabilities are f32 all the same, and a head is widened
/// while it is worked on. Flash keeps the log-sum-exp instead, one number a row; its backward takes a few tiles
/// a thread, and where dq is rounded its sums for two heads a thread. After any of them, candle adds each gradient to zeros.
/// Naive's products pack blocks of their factors, a few MiB whatever the sizes.
pub fn attention_account(workload: &AttentionWorkload) -> Account {
    between(beside(workload), workload)
}

/// What any algorithm has beside it.
fn beside(workload: &AttentionWorkload) -> Account {
    let width = workload.dtype.size_in_bytes();
    let n = workload.elements();
    Account::new(format!(
        "B {}, H {}, T {}, Dh {}, {width} bytes an element",
        workload.batch_size, workload.heads, workload.sequence_length, workload.head_dim
    ))
    .with(Holds::Inputs, "q, k, v", "3BHTDh", 3.0 * n, width)
    .with(Holds::Activations, "out", "BHTDh", n, width)
    .with(Holds::Scratch, "its gradient", "BHTDh", n, width)
    .with(Holds::Gradients, "dq, dk, dv", "3BHTDh", 3.0 * n, width)
}

/// As [`attention_account`], on `device`.
///
/// On a card naive attention is composed of ops: its scores are kept beside the probabilities, both in the dtype of q, k and v.
/// In backward candle adds the probabilities' gradient to zeros twice, once as the product's factor and once as the reshaped
/// softmax's, and has the product, both zeros and both sums at once.
pub fn attention_account_on(device: &Device, workload: &AttentionWorkload) -> Account {
    if !(device.is_cuda() && workload.algorithm == Algorithm::Naive) {
        return attention_account(workload);
    }
    let width = workload.dtype.size_in_bytes();
    let scores = workload.scores();
    let name = "the probabilities' gradient, zeros and sums";
    beside(workload)
        .with(Holds::Activations, "scores", "BHT^2", scores, width)
        .with(Holds::Activations, "probabilities", "BHT^2", scores, width)
        .with(Holds::Scratch, name, "5BHT^2", 5.0 * scores, width)
}

/// Adds what the algorithm keeps between forward and backward, and what backward takes for itself.
pub(super) fn between(account: Account, workload: &AttentionWorkload) -> Account {
    let width = workload.dtype.size_in_bytes();
    let scores = workload.scores();
    let n = workload.elements();
    let storing = 2.0 * n;
    let store = |account: Account| {
        account.with(
            Holds::Scratch,
            "a gradient's zeros and sum",
            "2BHTDh",
            storing,
            width,
        )
    };
    let wide = width.max(4); // half precision is computed in f32
    match workload.algorithm {
        Algorithm::Flash => {
            let account = account.with(
                Holds::Activations,
                "log-sum-exp",
                "BHT",
                workload.rows(),
                wide,
            );
            let account = match wide == width {
                true => account,
                false => account.with(
                    Holds::Activations,
                    "what rounding took from out",
                    "BHTDh",
                    n,
                    width,
                ),
            };
            let [_, scratch] = flash_scratch(workload);
            match scratch * wide as f64 > storing * width as f64 {
                true => account.with(
                    Holds::Scratch,
                    "delta, dq's sums, tiles",
                    "BHT + ..",
                    scratch,
                    wide,
                ),
                false => store(account),
            }
        }
        Algorithm::Naive => {
            let account = account.with(Holds::Activations, "probabilities", "BHT^2", scores, wide);
            let [_, scratch] = naive_scratch(workload);
            match scratch * wide as f64 > storing * width as f64 {
                true => account.with(
                    Holds::Scratch,
                    "scores' gradient, one a thread",
                    "T^2",
                    scratch,
                    wide,
                ),
                false => store(account),
            }
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

/// The same of a card's backward, in words.
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
