//! Stochastic rounding to bf16: on average, updates smaller than the spacing of bf16 numbers are not lost.
//!
//! The random bits are a function of a key and an element's index: the same on every device, for any number of threads.
//! The hash has two rounds of shift, exclusive or and multiplication, with the constants of `lowbias32`.

/// Returns the key of a parameter in a step.
pub(crate) fn key(seed: u64, step: usize, parameter: usize) -> u32 {
    [seed >> 32, step as u64, parameter as u64]
        .into_iter()
        .fold(mixed(seed as u32), |key, word| mixed(key ^ word as u32))
}

/// Returns the 32 random bits of an element.
#[inline(always)]
pub(crate) fn bits(key: u32, element: u32) -> u32 {
    mixed(key ^ element.wrapping_mul(0x9e37_79b9))
}

#[inline(always)]
fn mixed(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Rounds x to a bf16 neighbour, up in magnitude with the probability that makes the mean x. A bf16 number is returned
/// as it is. `random` has 16 bits.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32, random: u32) -> f32 {
    let bits = x.to_bits();
    // Only the bits of a NaN can overflow: the sum of a finite number is at most infinity's.
    let rounded = bits.wrapping_add(random) & 0xffff_0000;
    f32::from_bits(if x.is_finite() { rounded } else { bits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn the_mean_is_the_number() {
        for x in [1.001f32, -3.3e-5, 0.7, 1e30, 2f32.powi(-130)] {
            let neighbours = |up: u32| f32::from_bits((x.to_bits() & 0xffff_0000) + (up << 16));
            let n = 1 << 16;
            let rounded = (0..n).map(|i| round_to_bf16(x, bits(key(7, 3, 1), i) & 0xffff));
            let mut sum = 0.0;
            for y in rounded {
                assert!(y == neighbours(0) || y == neighbours(1), "{x} {y}");
                sum += f64::from(y);
            }
            let step = f64::from(neighbours(1) - neighbours(0)).abs();
            let error = (sum / f64::from(n) - f64::from(x)).abs();
            assert!(error < 0.01 * step, "{x}: {error:e} of {step:e}");
        }
    }

    #[test]
    fn what_is_in_bf16_stays() {
        for x in [0.0, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(round_to_bf16(x, 0xffff).to_bits(), f32::to_bits(x));
            assert_eq!(bf16::from_f32(x).to_f32().to_bits(), f32::to_bits(x));
        }
        assert!(round_to_bf16(f32::NAN, 0xffff).is_nan());
        assert!(round_to_bf16(f32::from_bits(u32::MAX), 0xffff).is_nan());
    }

    #[test]
    fn keys_differ() {
        let mut keys: Vec<u32> = (0..4)
            .flat_map(|seed| (0..50).flat_map(move |t| (0..50).map(move |p| key(seed << 31, t, p))))
            .collect();
        keys.sort();
        keys.dedup();
        assert!(keys.len() > 9_990, "{}", keys.len()); // of 10,000 draws from 2^32 values, hardly any occurs twice
    }
}
