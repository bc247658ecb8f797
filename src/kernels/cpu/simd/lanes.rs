//! Vector registers of one element type, for code whose speed must not depend on the compiler's vectorisation.

use super::Real;
use pulp::Simd;

/// Arithmetic on one register of instruction set `S`: 16 `f32` with AVX-512, 8 with AVX2, 4 with NEON, one without
/// SIMD.
///
/// Every function must be inlined into a [`pulp::WithSimd`] body, which is what compiles it for `S`.
pub trait Lanes: Real {
    /// A register.
    type Register<S: Simd>: Copy;

    /// Returns the number of elements in a register.
    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Register<S>>() / size_of::<Self>()
    }

    /// Loads a register from `from`, which need not be aligned.
    ///
    /// # Safety
    /// [`lanes`](Self::lanes) elements must be readable there.
    #[inline(always)]
    unsafe fn vload<S: Simd>(from: *const Self) -> Self::Register<S> {
        // SAFETY: the caller's promise; a register is plain data.
        unsafe { from.cast::<Self::Register<S>>().read_unaligned() }
    }

    /// Stores a register to `to`, which need not be aligned.
    ///
    /// # Safety
    /// [`lanes`](Self::lanes) elements must be writable there.
    #[inline(always)]
    unsafe fn vstore<S: Simd>(to: *mut Self, register: Self::Register<S>) {
        // SAFETY: the caller's promise; a register is plain data.
        unsafe { to.cast::<Self::Register<S>>().write_unaligned(register) }
    }

    fn vsplat<S: Simd>(simd: S, value: Self) -> Self::Register<S>;

    fn vadd<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;

    fn vsub<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;

    /// Returns `a b`, elementwise.
    fn vmul<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;

    /// Returns `a b + c`, rounded once if the processor can.
    fn vmul_add<S: Simd>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
        c: Self::Register<S>,
    ) -> Self::Register<S>;

    /// Returns the larger of both, lane by lane; unspecified for NaN.
    fn vmax<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;

    /// Returns `yes` where `a <= b`, else (also for NaN) `no`.
    fn vselect_at_most<S: Simd>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
        yes: Self::Register<S>,
        no: Self::Register<S>,
    ) -> Self::Register<S>;

    /// Returns e to the power of `x`, for `x` up to 88: within 2 ulp from -20 to 20 and within 5 elsewhere, 0 below
    /// -87, NaN for NaN.
    fn vexp<S: Simd>(simd: S, x: Self::Register<S>) -> Self::Register<S>;
}

/// Implements the methods that pulp names differently for each element type.
macro_rules! arithmetic {
    ($register:ident, $splat:ident, $add:ident, $sub:ident, $mul:ident, $mul_add:ident, $max:ident, $at_most:ident,
     $select:ident) => {
        type Register<S: Simd> = S::$register;

        #[inline(always)]
        fn vsplat<S: Simd>(simd: S, value: Self) -> S::$register {
            simd.$splat(value)
        }

        #[inline(always)]
        fn vadd<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
            simd.$add(a, b)
        }

        #[inline(always)]
        fn vsub<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
            simd.$sub(a, b)
        }

        #[inline(always)]
        fn vmul<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
            simd.$mul(a, b)
        }

        #[inline(always)]
        fn vmul_add<S: Simd>(
            simd: S,
            a: S::$register,
            b: S::$register,
            c: S::$register,
        ) -> S::$register {
            simd.$mul_add(a, b, c)
        }

        #[inline(always)]
        fn vmax<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
            simd.$max(a, b)
        }

        #[inline(always)]
        fn vselect_at_most<S: Simd>(
            simd: S,
            a: S::$register,
            b: S::$register,
            yes: S::$register,
            no: S::$register,
        ) -> S::$register {
            simd.$select(simd.$at_most(a, b), yes, no)
        }
    };
}

impl Lanes for f32 {
    arithmetic!(
        f32s,
        splat_f32s,
        add_f32s,
        sub_f32s,
        mul_f32s,
        mul_add_e_f32s,
        max_f32s,
        less_than_or_equal_f32s,
        select_f32s
    );

    /// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. exp(r) = 1 + r + r^2 q(r), where q of degree 4
    /// is the minimax fit (relative error 3e-9, a twentieth of a rounding).
    ///
    /// Attention calls this once per score: thirteen instructions.
    #[inline(always)]
    fn vexp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        const LOWEST: f32 = -87.0;
        // Adding 1.5 * 2^23 rounds to an integer, which is left in the low bits; with 127 more these are the exponent
        // field of 2^n.
        const ROUND: f32 = 12_582_912.0 + 127.0;
        const Q: [f32; 5] = [
            0.001_381_454,
            0.008_368_745,
            0.041_668_39,
            0.166_665_2,
            0.499_999_93,
        ];
        let vanishes = simd.less_than_f32s(x, simd.splat_f32s(LOWEST)); // false for NaN
        let round = simd.splat_f32s(ROUND);
        let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), round);
        let n = simd.sub_f32s(shifted, round);
        // A single step, which must be fused: ln 2 as an f32 is off by 2e-9, and n is small where the result is not.
        let r = simd.mul_add_f32s(n, simd.splat_f32s(-std::f32::consts::LN_2), x);
        let mut p = simd.splat_f32s(Q[0]);
        for coefficient in [Q[1], Q[2], Q[3], Q[4], 1.0, 1.0] {
            p = simd.mul_add_e_f32s(p, r, simd.splat_f32s(coefficient));
        }
        let bits = simd.transmute_u32s_f32s(shifted);
        let field = simd.wrapping_dyn_shl_u32s(bits, simd.splat_u32s(23));
        // Multiplied instead of added to p's exponent, which would turn NaN into numbers.
        let value = simd.mul_f32s(p, simd.transmute_f32s_u32s(field));
        simd.select_f32s(vanishes, simd.splat_f32s(0.0), value)
    }
}

impl Lanes for f64 {
    arithmetic!(
        f64s,
        splat_f64s,
        add_f64s,
        sub_f64s,
        mul_f64s,
        mul_add_e_f64s,
        max_f64s,
        less_than_or_equal_f64s,
        select_f64s
    );

    /// Runs lane by lane: f64 is for checks, where the standard library's accuracy matters more than speed.
    #[inline(always)]
    fn vexp<S: Simd>(_: S, x: S::f64s) -> S::f64s {
        let mut values = [0f64; 8];
        assert!(Self::lanes::<S>() <= values.len());
        // SAFETY: a register has no more elements than the array, as just asserted.
        unsafe {
            Self::vstore::<S>(values.as_mut_ptr(), x);
            for value in &mut values[..Self::lanes::<S>()] {
                *value = value.exp();
            }
            Self::vload::<S>(values.as_ptr())
        }
    }
}

/// Returns every instruction set that this processor has, to test the code compiled for each.
#[cfg(test)]
pub(crate) fn instruction_sets() -> Vec<pulp::Arch> {
    #[allow(unused_mut)]
    let mut all = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    {
        all.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
        all.extend(pulp::x86::V4::try_new().map(pulp::Arch::V4));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    struct Exponentials<'a, T>(&'a mut [T]);

    impl<T: Lanes> WithSimd for Exponentials<'_, T> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (count, end) = (T::lanes::<S>(), self.0.len());
            assert!(end.is_multiple_of(count));
            for start in (0..end).step_by(count) {
                // SAFETY: whole registers of the slice.
                unsafe {
                    let at = self.0.as_mut_ptr().add(start);
                    T::vstore::<S>(at, T::vexp(simd, T::vload::<S>(at)));
                }
            }
        }
    }

    #[test]
    fn exp_is_within_a_few_ulp() {
        let x: Vec<f32> = (0..1_600_000).map(|i| 88.0 - i as f32 * 1.09e-4).collect();
        for arch in instruction_sets() {
            let mut y = x.clone();
            arch.dispatch(Exponentials(&mut y));
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).exp();
                let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                match *x < -87.0 {
                    true => assert_eq!(*y, 0.0, "{x}"),
                    false => {
                        let allowed = if x.abs() < 20.0 { 2.0 } else { 5.0 };
                        assert!((f64::from(*y) - exact).abs() < allowed * ulp, "{x}");
                    }
                }
            }
        }
    }

    #[test]
    fn exp_at_the_edges() {
        let payload = f32::from_bits(0x7fc0_0001);
        let (low, nan) = (f32::NEG_INFINITY, f32::NAN);
        let special = [0.0, low, -1e30, nan, payload, -payload, 1.0, -0.0];
        for arch in instruction_sets() {
            let mut y = [0f32; 16];
            y[..8].copy_from_slice(&special);
            arch.dispatch(Exponentials(&mut y));
            assert_eq!([y[0], y[1], y[2], y[7]], [1.0, 0.0, 0.0, 1.0]);
            assert!(y[3].is_nan() && y[4].is_nan() && y[5].is_nan());
            assert!((y[6] - std::f32::consts::E).abs() < 3e-7);

            let x = [1f64, -2.0, 0.0, f64::NEG_INFINITY, 3.0, 4.0, 5.0, 6.0];
            let mut y = x;
            arch.dispatch(Exponentials(&mut y));
            assert_eq!(y, x.map(f64::exp));
        }
    }
}
