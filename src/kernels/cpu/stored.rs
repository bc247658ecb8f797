//! What a kernel may read from memory, and what it computes in: half precision is stored, never computed in.

use super::Real;
use candle_core::WithDType;
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Elements converted at a time: a buffer that stays in the first-level cache.
pub const BLOCK: usize = 512;

/// An element type of tensors, read and written in blocks of the type that arithmetic is done in.
///
/// `f32` and `f64` are their own; `f16` and `bf16` are widened to `f32`.
pub trait Stored: WithDType {
    /// The type computed in.
    type Wide: Real + Into<f64>;

    /// `to = from`, exactly; slices of one length.
    fn load(from: &[Self], to: &mut [Self::Wide]);

    /// `to = from`, rounded to the nearest (ties to even); slices of one length.
    fn store(from: &[Self::Wide], to: &mut [Self]);
}

impl Stored for f32 {
    type Wide = f32;

    #[inline(always)]
    fn load(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn store(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Stored for f64 {
    type Wide = f64;

    #[inline(always)]
    fn load(from: &[f64], to: &mut [f64]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn store(from: &[f64], to: &mut [f64]) {
        to.copy_from_slice(from);
    }
}

impl Stored for f16 {
    type Wide = f32;

    #[inline(always)]
    fn load(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn store(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Stored for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn load(from: &[bf16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn store(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}
