//! Matmuls of bf16 by the processor's bf16 instructions, where it has them: tiles (AMX-BF16) or dot products of pairs
//! (AVX512-BF16; on AArch64 `bfdot`, on request).
//!
//! Blocks of both factors are packed as bf16 into tiles that all these instructions read ([`pack`]): 16 rows of a by 32
//! elements of the depth, and 16 columns of b by 16 pairs of the depth. A block of c is 32 x 32. Its sums are `f32`,
//! run over the whole depth in an order that the depth alone decides ([`matmul`]), and are rounded once.
//!
//! The x86-64 instructions round sums to nearest, ties to even; those of AArch64 round to odd. All flush denormals: an
//! element of a or b below 2^-126 counts as zero, and so does a sum. Units differ in the order and rounding of sums,
//! and so in their last bits.
//!
//! Attention's f32 tiles are multiplied as sums of two bf16 terms ([`terms`]).
//!
//! [`unit`] decides which instructions are used; `gemm/product.rs` decides between this module and widening to `f32`.

// On other architectures there is no unit, and only tests call the rest.
#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused)
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod emulated;
mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
mod output;
mod pack;
mod terms;
#[cfg(test)]
mod tests;
mod tile;
mod unit;

pub(super) use matmul::{matmul, matmul_of_tiles};
pub(super) use output::Output;
pub(super) use pack::Lines;
pub(super) use tile::SIDE;
pub(crate) use unit::{Unit, unit, unit_of_tiles};
