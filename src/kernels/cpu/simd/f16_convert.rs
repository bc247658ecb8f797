//! Conversion of `f16` slices from and to `f32`, by the processor's instruction where it has one.
//!
//! The conversions of `half` call a function for every eight elements, which makes them two to three times slower on a
//! block.

use half::{f16, slice::HalfFloatSliceExt};

/// Converts `from` to f32, exactly; slices of one length.
#[inline]
pub fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the processor has the instructions, as just checked.
        return unsafe { x86::widen(from, to) };
    }
    from.convert_to_f32_slice(to);
}

/// Converts `from` to f16, rounded to nearest (ties to even); slices of one length.
#[inline]
pub fn round(from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: as above.
        return unsafe { x86::round(from, to) };
    }
    to.convert_from_f32_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use half::f16;
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps,
        _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
    };

    /// Elements that one instruction converts.
    const LANES: usize = 8;

    #[inline(always)]
    pub fn available() -> bool {
        is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c")
    }

    #[target_feature(enable = "avx,f16c")]
    pub fn widen(from: &[f16], to: &mut [f32]) {
        let (from, from_rest) = from.as_chunks::<LANES>();
        let (to, to_rest) = to.as_chunks_mut::<LANES>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: eight elements on either side; neither access needs alignment.
            unsafe {
                let halves = _mm_loadu_si128(from.as_ptr().cast());
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(halves));
            }
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = from.to_f32();
        }
    }

    #[target_feature(enable = "avx,f16c")]
    pub fn round(from: &[f32], to: &mut [f16]) {
        let (from, from_rest) = from.as_chunks::<LANES>();
        let (to, to_rest) = to.as_chunks_mut::<LANES>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: as above.
            unsafe {
                let values = _mm256_loadu_ps(from.as_ptr());
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                _mm_storeu_si128(to.as_mut_ptr().cast(), halves);
            }
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = f16::from_f32(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the bits are equal, or both are NaN.
    fn same(a: f16, b: f16) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[test]
    fn every_f16_there_and_back() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut wide = vec![0f32; all.len()];
        widen(&all, &mut wide);
        for (half, wide) in all.iter().zip(&wide) {
            let expected = half.to_f32();
            assert!(wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()));
        }
        let mut back = vec![f16::ZERO; all.len()];
        round(&wide, &mut back);
        assert!(back.iter().zip(&all).all(|(back, half)| same(*back, *half)));
    }

    /// Returns the next f16 as a number; 2^16 after the largest.
    fn next(half: f16) -> f32 {
        match half.to_bits() + 1 {
            0x7c00 => 65536.0,
            bits => f16::from_bits(bits).to_f32(),
        }
    }

    /// Values at, around and between the ties of every f16, above the largest and below the smallest.
    #[test]
    fn rounds_to_nearest_even_at_every_length() {
        let finite = (0..0x7c00).map(|bits| f16::from_bits(bits).to_f32());
        let values: Vec<f32> = finite
            .flat_map(|low| {
                let tie = low + (next(f16::from_f32(low)) - low) / 2.0;
                [tie.next_down(), tie, -tie, tie.next_up()]
            })
            .collect();
        let mut rounded = vec![f16::ZERO; values.len()];
        round(&values, &mut rounded);
        for (value, rounded) in values.iter().zip(&rounded) {
            assert!(same(*rounded, f16::from_f32_const(*value)), "{value}");
        }
        for length in 0..40 {
            let mut part = vec![f16::ONE; length];
            round(&values[7..7 + length], &mut part);
            assert_eq!(part, rounded[7..7 + length]);
        }
    }
}
