//! Element types in memory, and their compute types: half precision is stored but never computed in.

use super::{Lanes, f16_convert};
use candle_core::WithDType;
use half::{bf16, f16};
use std::any::TypeId;

/// Elements that are converted at a time; the buffer stays in the first-level cache.
pub const BLOCK: usize = 512;

/// Casts a slice to B if that is the same type as A; for generic kernels that have special code for one type.
#[inline(always)]
pub(crate) fn same_type<A: 'static, B: 'static>(x: &[A]) -> Option<&[B]> {
    let is_same = TypeId::of::<A>() == TypeId::of::<B>();
    // SAFETY: the types are the same.
    is_same.then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) })
}

/// Casts a mutable slice, like [`same_type`].
#[inline(always)]
pub(crate) fn same_type_mut<A: 'static, B: 'static>(x: &mut [A]) -> Option<&mut [B]> {
    let is_same = TypeId::of::<A>() == TypeId::of::<B>();
    // SAFETY: the types are the same.
    is_same.then(|| unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), x.len()) })
}

/// An element type of tensors, read and written in blocks of its compute type.
///
/// `f32` and `f64` are their own compute types; `f16` and `bf16` are widened to `f32`.
pub trait Stored: WithDType {
    /// The compute type.
    type Wide: Lanes + Into<f64> + Stored<Wide = Self::Wide>;

    /// Returns the elements themselves if this is its own compute type.
    #[inline(always)]
    fn as_wide(_elements: &[Self]) -> Option<&[Self::Wide]> {
        None
    }

    /// Returns the elements for writing, like [`as_wide`](Self::as_wide).
    #[inline(always)]
    fn as_wide_mut(_elements: &mut [Self]) -> Option<&mut [Self::Wide]> {
        None
    }

    /// Converts `from` to the compute type, exactly; slices of one length.
    fn load(from: &[Self], to: &mut [Self::Wide]);

    /// Converts `from` to this type, rounded to nearest (ties to even); slices of one length.
    fn store(from: &[Self::Wide], to: &mut [Self]);
}

impl Stored for f32 {
    type Wide = f32;

    #[inline(always)]
    fn as_wide(elements: &[f32]) -> Option<&[f32]> {
        Some(elements)
    }

    #[inline(always)]
    fn as_wide_mut(elements: &mut [f32]) -> Option<&mut [f32]> {
        Some(elements)
    }

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
    fn as_wide(elements: &[f64]) -> Option<&[f64]> {
        Some(elements)
    }

    #[inline(always)]
    fn as_wide_mut(elements: &mut [f64]) -> Option<&mut [f64]> {
        Some(elements)
    }

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
        f16_convert::widen(from, to);
    }

    #[inline(always)]
    fn store(from: &[f32], to: &mut [f16]) {
        f16_convert::round(from, to);
    }
}

// The conversion of the `half` crate is not used: its branches prevent vectorisation.
impl Stored for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn load(from: &[bf16], to: &mut [f32]) {
        assert_eq!(from.len(), to.len());
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn store(from: &[f32], to: &mut [bf16]) {
        assert_eq!(from.len(), to.len());
        for (to, from) in to.iter_mut().zip(from) {
            *to = bf16::from_bits(bf16_bits(*from));
        }
    }
}

/// Returns the nearest `bf16` to `value`, ties to even; NaN stays NaN.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    const QUIET_NAN: u32 = 0x0040;
    let bits = value.to_bits();
    // Half a unit in the last kept place, minus one if that place is even: exact ties then round up only if it is odd.
    // A carry out of the mantissa raises the exponent, and out of the largest exponent gives infinity.
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | QUIET_NAN;
    (if value.is_nan() { nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        // Every upper half, with lower halves at and around the ties.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits((u32::from(upper) << 16) | lower);
                let mut stored = [bf16::ZERO];
                Stored::store(&[value], &mut stored);
                assert_eq!(
                    stored[0].to_bits(),
                    bf16::from_f32(value).to_bits(),
                    "{value}"
                );
                let mut loaded = [0f32];
                Stored::load(&stored, &mut loaded);
                assert_eq!(loaded[0].to_bits(), stored[0].to_f32().to_bits());
            }
        }
    }
}
