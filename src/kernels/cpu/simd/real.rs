//! The compute types of the CPU kernels.

use candle_core::WithDType;
use candle_core::cpu::erf::erfc_f64;
use std::ops::Neg;

/// A floating-point type that the CPU kernels compute in.
pub trait Real: WithDType + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn real(value: f64) -> Self;

    fn square_root(self) -> Self;

    /// Returns e to the power of `self`.
    ///
    /// The `f32` version is branch-free and vectorises: within 2 ulp, 0 below -87, infinite above 88.7.
    fn exponential(self) -> Self;

    fn logarithm(self) -> Self;

    /// Returns `self` to the power `exponent`.
    fn power(self, exponent: Self) -> Self;

    /// Returns the hyperbolic tangent. The `f32` version is branch-free, like [`exponential`](Self::exponential);
    /// within 4 ulp.
    fn hyperbolic_tangent(self) -> Self;

    /// Returns the standard normal cumulative distribution at x = `self`, given `e = exp(-x^2 / 2)`. The `f32` version
    /// is branch-free; its relative error is 5e-7 for |x| up to 2, and 2e-6 up to 6.
    fn normal_share(self, e: Self) -> Self;

    /// Returns the larger of two; NaN if `other` is NaN.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn real(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn square_root(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn exponential(self) -> Self {
        exp_f32(self)
    }

    #[inline(always)]
    fn logarithm(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn power(self, exponent: Self) -> Self {
        self.powf(exponent)
    }

    #[inline(always)]
    fn hyperbolic_tangent(self) -> Self {
        tanh_f32(self)
    }

    #[inline(always)]
    fn normal_share(self, e: Self) -> Self {
        normal_share_f32(self, e)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    #[inline(always)]
    fn real(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn square_root(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn exponential(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn logarithm(self) -> Self {
        self.ln()
    }

    #[inline(always)]
    fn power(self, exponent: Self) -> Self {
        self.powf(exponent)
    }

    #[inline(always)]
    fn hyperbolic_tangent(self) -> Self {
        self.tanh()
    }

    #[inline(always)]
    fn normal_share(self, _: Self) -> Self {
        0.5 * erfc_f64(-self * std::f64::consts::FRAC_1_SQRT_2)
    }
}

/// Returns the parts of exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2: a number with n in its low
/// bits, and exp(r) - 1 by its Taylor polynomial of degree 7 (remainder 2^-28 of exp(r) at the interval's end).
#[inline(always)]
fn exp_reduced(x: f32) -> (f32, f32) {
    // Adding and subtracting 1.5 * 2^23 rounds to an integer, which the sum has in its low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4; // 0.693359375: few bits: n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;

    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    (shifted, p * (r * r) + r)
}

/// Returns tanh(x) = -m / (2 + m) with the sign of x, where m = exp(-2 |x|) - 1, which does not cancel for small x.
#[inline(always)]
fn tanh_f32(x: f32) -> f32 {
    const LOWEST: f32 = -40.0; // where m is -1 to the last bit
    let power = -2.0 * x.abs();
    let (shifted, p) = exp_reduced(if power < LOWEST { LOWEST } else { power });
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let m = p * scale + (scale - 1.0);
    (-m / (2.0 + m)).copysign(x)
}

/// Returns the normal distribution function: `e t q(t)` for negative x and 1 minus that for positive x, with
/// t = 1 / (1 + 0.3 |x|). q of degree 7 fits erfc divided by the exponential (relative error 5e-8 for |x| up to 9; beyond, only
/// the exponential matters).
#[inline(always)]
fn normal_share_f32(x: f32, e: f32) -> f32 {
    const Q: [f32; 8] = [
        0.119_605_49,
        0.121_105_7,
        0.097_783_96,
        0.135_420_15,
        -0.066_402_55,
        0.219_971_21,
        -0.165_019_63,
        0.037_535_705,
    ];
    let t = 1.0 / (1.0 + 0.3 * x.abs());
    let mut q = Q[7];
    for coefficient in [Q[6], Q[5], Q[4], Q[3], Q[2], Q[1], Q[0]] {
        q = q * t + coefficient;
    }
    let beyond = e * (q * t);
    if x < 0.0 { beyond } else { 1.0 - beyond }
}

/// Returns exp(x) for any x.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.722_83;

    // Comparisons instead of min and max, because they pass NaN through.
    let clamped = if x < LOWEST { LOWEST } else { x };
    let clamped = if clamped > HIGHEST { HIGHEST } else { clamped };
    let (shifted, p) = exp_reduced(clamped);
    let p = p + 1.0;
    // 2^n is computed as 2 * 2^(n-1): n reaches 128, whose exponent field would be infinity.
    let half_power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(126 << 23));
    let value = (p * 2.0) * half_power;
    let value = if x < LOWEST { 0.0 } else { value };
    if x > HIGHEST { f32::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_f32_is_within_two_ulp() {
        let mut worst = 0.0f64;
        let mut x = -86.9f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(x.exponential()) - exact).abs() / ulp);
            x += 1.7e-3;
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn tanh_f32_is_within_four_ulp() {
        let mut worst = 0.0f64;
        let small = (0..120).map(|i| 2f32.powi(-i) * 1.37);
        let large = (0..40_000).map(|i| i as f32 * 3.3e-4);
        for x in small.chain(large) {
            let exact = f64::from(x).tanh();
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            let (found, opposite) = (x.hyperbolic_tangent(), (-x).hyperbolic_tangent());
            assert_eq!(found, -opposite);
            worst = worst.max((f64::from(found) - exact).abs() / ulp);
        }
        assert!(worst < 4.0, "{worst} ulp");
        for (x, y) in [(1e30, 1.0), (f32::INFINITY, 1.0), (0.0, 0.0)] {
            assert_eq!(x.hyperbolic_tangent(), y);
        }
        assert!(f32::NAN.hyperbolic_tangent().is_nan());
    }

    #[test]
    fn normal_share_f32_is_erfcs() {
        let share = |x: f32| x.normal_share((-0.5 * x * x).exponential());
        for i in -60_000..60_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).normal_share(f64::NAN);
            let allowed = if x.abs() < 2.0 { 5e-7 } else { 2e-6 };
            let found = f64::from(share(x));
            assert!(
                (found - exact).abs() <= allowed * exact,
                "{x}: {found}, not {exact}"
            );
        }
        assert_eq!([share(20.0), share(-20.0), share(1e30)], [1.0, 0.0, 1.0]);
        assert!(share(f32::NAN).is_nan());
    }

    #[test]
    fn exp_f32_at_the_edges() {
        assert_eq!(0f32.exponential(), 1.0);
        assert_eq!(f32::NEG_INFINITY.exponential(), 0.0);
        assert_eq!((-1e30f32).exponential(), 0.0);
        assert_eq!(f32::INFINITY.exponential(), f32::INFINITY);
        assert_eq!(89f32.exponential(), f32::INFINITY);
        assert!(88.7f32.exponential().is_finite());
        assert!(f32::NAN.exponential().is_nan());
    }
}
