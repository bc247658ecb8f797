//! FlashAttention-2 on the CPU: attention in tiles that stay in cache, nothing of size Tq Tk.
//!
//! What lives here: the two passes ([`forward()`], [`backward()`]), the tiles they work in ([`Tiles`]) and the views
//! they read ([`Heads`]). What does not: the matrix products of tiles (`gemm::tile`), and the reference, which is the
//! readable form of the same algorithm (`attention::reference::flash`).
//!
//! A product of tiles reads its left factor element by element and its right factor in registers, so no tile is
//! transposed on the way from one product to the next if the lanes are chosen well:
//!
//! - forward keeps queries in the lanes: S^T = K Q^T (keys, queries), O^T = V^T P^T (Dh, queries). The softmax of a
//!   query is then lane by lane, without a horizontal sum. Only Q is transposed, once a tile of queries;
//! - backward keeps keys in the lanes of S and dP, and Dh in those of dQ, dK and dV. Only K and V are transposed, once
//!   a tile of keys.
//!
//! Where a unit for bf16 multiplies (AMX), tiles are packed for it as they are multiplied, and scores and dS take the
//! scale that Q and K have otherwise, which then have one term of bf16 each.
//!
//! Tri Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and
//! 2.

mod backward;
mod backward_tile;
mod forward;
mod heads;
mod online_softmax;
mod panel;
mod scale;
mod score_gradient;
mod tiles;
mod transpose;
mod turns;

pub use backward::{Gradients, backward, backward_scratch_elements};
pub use backward_tile::Inputs;
pub use forward::{ForwardInputs, Outputs, forward, forward_scratch_elements};
pub use heads::Heads;
pub use tiles::Tiles;

pub use crate::kernels::attention::Sizes;
