//! Matrix multiplication: strided views ([`MatRef`], [`MatMut`]) and matmuls of them.
//!
//! `matmul` chooses between three implementations. The crate's own kernel consists of the micro-kernel
//! (`micro_kernel`, which attention calls through `tile`), packing (`pack`), and the loops around them (`packed`,
//! divided into tasks by `cut`). The `gemm` crate multiplies where it is faster (`panels`); `choice` decides by the
//! shape and the instruction set found at run time. On processors with bf16 instructions, `bf16` multiplies bf16.

mod batched;
pub(crate) mod bf16;
mod choice;
mod cut;
mod matmul;
mod matrix;
mod micro_kernel;
mod pack;
mod packed;
mod packing;
mod panels;
mod scratch;
#[cfg(test)]
mod tests;
mod threads;
pub(crate) mod tile;

pub use batched::{Batched, matmul_batched};
pub use choice::MatmulSizes;
pub use matmul::{matmul, matmul_to};
pub use matrix::{MatMut, MatRef};
pub use packing::packing_bytes;
pub use scratch::{reserve_scratch, scratch_bytes};
pub use threads::Threads;
