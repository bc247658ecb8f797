//! The element types of the CPU kernels.

use candle_core::WithDType;
use std::ops::Neg;

/// A floating-point type that the CPU kernels compute in.
pub trait Real: WithDType + Neg<Output = Self> {
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;

    /// The nearest value to `value`.
    fn real(value: f64) -> Self;

    /// Its square root.
    fn square_root(self) -> Self;

    /// e to its power.
    ///
    /// For `f32` a branch-free form that vectorises: within 2 ulp, 0 below -87, infinite above 88.7.
    fn exponential(self) -> Self;

    /// Its natural logarithm.
    fn logarithm(self) -> Self;

    /// The larger of two; NaN if `other` is NaN.
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
}

/// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, exp(r) by its Taylor polynomial of degree 7
/// (remainder 2^-28 of the value at the interval's end).
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.722_83;
    // Adding and taking away 1.5 * 2^23 rounds to an integer, and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4; // 0.693359375: few bits: n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;

    // Comparisons, not min and max: they let a NaN through.
    let clamped = if x < LOWEST { LOWEST } else { x };
    let clamped = if clamped > HIGHEST { HIGHEST } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    // 2^n as 2 * 2^(n-1): n reaches 128, whose exponent field would read as infinity.
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
