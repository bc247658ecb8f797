//! Truncated normal numbers from random words, with the same bits on every device.

use super::philox::Stream;

/// The bound of the absolute value of a number, in standard deviations.
#[cfg(test)]
pub(crate) const CUT: f64 = 3.0;

/// erf(3 / sqrt(2)): the probability that a normal number is within 3 standard deviations.
const INSIDE: f64 = 0.997_300_203_936_739_8;

// The quantile of x in (-INSIDE, INSIDE) is x P(t) / Q(t) with t = 1 - x^2, a minimax rational approximation with a
// relative error of 2.4e-8. Coefficients begin with the lowest power; all are positive, so nothing cancels.
const P: [f64; 8] = [
    4.916153204249713e-8,
    4.671128001711748e-5,
    0.007041928464515937,
    0.2642860993878242,
    2.7991373176348473,
    8.201792099468802,
    5.484918260902054,
    0.39618923030298564,
];
const Q: [f64; 8] = [
    1.2648572081170906e-8,
    1.4411534808405508e-5,
    0.00253038708530069,
    0.11184715099701176,
    1.4449544109938264,
    5.531286725137423,
    5.595809050136246,
    1.0,
];

/// Returns a standard normal number, truncated at 3 standard deviations: `F^-1((word + 1/2) / 2^32)`, F being its
/// distribution function. Operations are rounded as in IEEE 754, so the bits are the same on every device.
#[inline(always)]
pub(crate) fn quantile(word: u32) -> f64 {
    const UNIT: f64 = 1.0 / (1u64 << 31) as f64;
    let x = ((f64::from(word) + 0.5) * UNIT - 1.0) * INSIDE;
    let t = (-x).mul_add(x, 1.0);
    let (mut p, mut q) = (P[7], Q[7]);
    for i in (0..7).rev() {
        p = p.mul_add(t, P[i]);
        q = q.mul_add(t, Q[i]);
    }
    x * p / q
}

/// Returns the random stream of a seed and a name.
pub(crate) fn stream(seed: u64, name: &str) -> Stream {
    Stream::named(seed, fnv1a(name))
}

/// Returns the 64-bit FNV-1a hash. Unlike std's hash, it is stable across versions and platforms.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns F(z) - 1/2 for the normal distribution function F, by the series phi(z) (z + z^3 / 3 + z^5 / 15 + ..).
    fn above_half(z: f64) -> f64 {
        let (mut term, mut sum) = (z, z);
        for n in 1..200 {
            term *= z * z / f64::from(2 * n + 1);
            sum += term;
        }
        sum * (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    #[test]
    fn the_distribution_of_a_quantile_is_its_word() {
        let words = (0..=u32::MAX).step_by(65_521);
        let ends = [0, 1, 2, 1 << 31, (1 << 31) - 1, u32::MAX];
        for word in words.chain(ends) {
            let wanted = ((f64::from(word) + 0.5) / 2f64.powi(32) - 0.5) * INSIDE;
            let z = quantile(word);
            assert!(z.abs() < CUT, "{word}: {z}");
            // dF = phi(z) dz, and the relative error of the quantile is at most 2.4e-8.
            let bound = 3e-8 * z.abs() * 0.4 * (-0.5 * z * z).exp() + 1e-15;
            let error = (above_half(z) - wanted).abs();
            assert!(
                error <= bound,
                "{word}: {z} is {error:e} off, {bound:e} allowed"
            );
        }
    }

    #[test]
    fn quantiles_rise() {
        for start in [0, 1 << 20, (1 << 31) - 1000, 3 << 30, u32::MAX - 2000] {
            let quantiles: Vec<f64> = (start..start + 2000).map(quantile).collect();
            assert!(quantiles.is_sorted(), "{start}");
        }
    }
}
