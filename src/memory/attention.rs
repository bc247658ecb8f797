//! The memory of attention, from its sizes alone.

use super::{Account, Holds};
use crate::attention::{Algorithm, Mask};
use crate::kernels::cpu::flash_attention::Tiles;
use crate::kernels::cpu::gemm::tile::COLUMNS;
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

/// What one attention holds on the CPU at its worst moment, with its inputs: predicted, for deciding whether it fits.
///
/// Naive overwrites its scores with the probabilities, so they exist once; its backward takes a matrix of (T, T) for
/// each of B H, one a thread at a time. In half precision the probabilities are f32 all the same, and a head is widened
/// while it is worked on. Flash keeps the log-sum-exp instead, one number a row; its backward takes a few tiles
/// a thread, and where dq is rounded its sums for two heads a thread. After any of them, candle adds each gradient to zeros.
///
/// Left out: the matrix products' packing buffers, a few MiB whatever the sizes.
pub fn attention_account(workload: &AttentionWorkload) -> Account {
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
    between(account, workload)
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
            let scratch = flash_scratch(workload);
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
            let scratch = naive_scratch(workload)[1];
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
/// precision is widened to, head by head.
pub(super) fn naive_scratch(workload: &AttentionWorkload) -> [f64; 2] {
    let (t, threads) = (
        workload.sequence_length as f64,
        rayon::current_num_threads() as f64,
    );
    // As the kernel shares its matrices out.
    let at_once = match workload.matrices() < 2.0 * threads {
        true => 1.0,
        false => threads,
    };
    // q, k, v and out before it is rounded; q, k, v, dout, and dq, dk, dv before they are rounded.
    let widened = match workload.dtype.size_in_bytes() < 4 {
        true => t * workload.head_dim as f64,
        false => 0.0,
    };
    [at_once * 4.0 * widened, at_once * (t * t + 7.0 * widened)]
}

/// Elements that flash's backward takes for itself: delta, the dq that is not written in place, the tiles of a thread.
pub(super) fn flash_scratch(workload: &AttentionWorkload) -> f64 {
    let (t, head_dim) = (workload.sequence_length, workload.head_dim);
    let tiles = Tiles::for_head_dim(head_dim);
    let threads = rayon::current_num_threads() as f64;
    let width = head_dim.next_multiple_of(COLUMNS);
    let matrices = workload.batch_size.saturating_mul(workload.heads);
    let one_dq = t as f64 * width as f64;
    let in_place = width == head_dim && workload.dtype.size_in_bytes() >= 4;
    let dq = match in_place {
        true => 0.0,
        false => (2.0 * threads).min(matrices as f64) * one_dq,
    };
    let q_tile = tiles.backward_q_tile.min(t);
    let k_tile = tiles.backward_k_tile.min(t).next_multiple_of(COLUMNS);
    let tile = 2 * k_tile * head_dim + 3 * k_tile * width + 2 * q_tile * (width + k_tile);
    workload.rows() + dq + threads * tile as f64
}
