//! Products of bf16 by the processor's own instructions, where it has them: tiles (AMX-BF16) or dot products of pairs
//! (AVX512-BF16; on AArch64 `bfdot`, where it is asked for).
//!
//! Blocks of both factors are packed as they are, in bf16, into tiles that all these instructions read ([`pack`]): 16
//! rows of a by 32 of the depth, and 16 columns of b by 16 pairs of the depth. A block of c is 32 x 32, whose sums are
//! `f32`, taken over the whole depth in an order that the depth alone decides ([`product`]), and rounded once.
//!
//! Those of x86-64 round sums to the nearest, ties to even, AArch64's to odd. All take denormal factors and sums as
//! zero: an element of a or b below 2^-126 counts as zero, and so does a sum. The sums differ in order and rounding,
//! and so in their last bits.
//!
//! Tiles of attention that are in f32 are multiplied as sums of two terms of bf16 ([`terms`]).
//!
//! What lives here: the instructions, and products of whole matrices. What does not: who decides between them and
//! widening to `f32` ([`unit`] says which instructions there are, `product.rs` beside this module calls).

// On other architectures there is no unit, and nothing but tests calls the rest.
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
#[cfg(target_arch = "aarch64")]
mod neon;
mod output;
mod pack;
mod product;
mod terms;
#[cfg(test)]
mod tests;
mod tile;
mod unit;

pub(super) use output::Output;
pub(super) use pack::Lines;
pub(super) use product::{product, product_of_tiles};
pub(super) use tile::SIDE;
pub(crate) use unit::{Unit, unit, unit_of_tiles};
