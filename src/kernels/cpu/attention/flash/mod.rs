//! FlashAttention-2 on the CPU: attention in tiles that stay in cache, with no buffer of size Tq Tk.
//!
//! [`forward()`] and [`backward()`] work in tiles ([`Tiles`]) on strided views ([`Heads`]). The same algorithm in
//! readable form is the reference, `attention::reference::flash`.
//!
//! A tile matmul reads its left factor element by element and its right factor in registers. With the right choice of
//! lanes, no tile is transposed between one matmul and the next:
//!
//! - Forward has queries in the lanes: S^T = K Q^T (keys, queries), O^T = V^T P^T (Dv, queries). The softmax of a query
//!   then needs no horizontal sum. Only Q is transposed, once per tile of queries.
//! - Backward has keys in the lanes of S and dP, and Dh or Dv in those of dQ, dK and dV. Only K and V are transposed,
//!   once per tile of keys.
//!
//! If a bf16 unit (AMX) multiplies, tiles are packed for it at each matmul. The scale is then applied to scores and dS
//! instead of Q and K, so that Q and K need only one bf16 term each.
//!
//! Tri Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and
//! 2.

mod backward;
mod backward_tile;
mod bias_gradient;
mod forward;
mod heads;
mod masks;
mod online_softmax;
mod panel;
mod scale;
mod score_gradient;
mod tiles;
mod transpose;
mod turns;

pub use backward::{Gradients, backward, backward_scratch_elements};
pub use backward_tile::Inputs;
pub use bias_gradient::{bias_gradient, bias_gradient_scratch_elements};
pub use forward::{ForwardInputs, Outputs, forward, forward_scratch_elements};
pub use heads::Heads;
pub use masks::Masks;
pub use tiles::Tiles;

pub use crate::kernels::attention::Sizes;
