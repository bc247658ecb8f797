//! Matrix multiplication: strided views ([`MatRef`], [`MatMut`]) and products of them.
//!
//! The product of our own is the micro-kernel (`micro_kernel`, which attention calls through `tile`), packing (`pack`),
//! and the loops around them (`packed`, cut into tasks by `cut`). Where the `gemm` crate is faster, it multiplies
//! (`panels`): `choice` decides by the processor's instructions, found at run time, and by the shape. Where the
//! processor multiplies bf16 itself, products of bf16 are its own (`bf16`). `product` calls the one or the other.

mod batched;
pub(crate) mod bf16;
mod choice;
mod cut;
mod matrix;
mod micro_kernel;
mod pack;
mod packed;
mod packing;
mod panels;
mod product;
mod scratch;
#[cfg(test)]
mod tests;
mod threads;
pub(crate) mod tile;

pub use batched::{Batched, matmul_batched};
pub use choice::ProductSizes;
pub use matrix::{MatMut, MatRef};
pub use packing::packing_bytes;
pub use product::{matmul, matmul_to};
pub use scratch::{reserve_scratch, scratch_bytes};
pub use threads::Threads;
