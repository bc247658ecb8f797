//! Vector code without intrinsics: loops that the compiler vectorises, compiled for each instruction set, of which one
//! is chosen at run time.

mod blocks;
mod f16_convert;
mod lanes;
mod real;
mod stored;

pub(super) use blocks::Blocks;
pub use lanes::Lanes;
#[cfg(test)]
pub(crate) use lanes::instruction_sets;
pub use real::Real;
pub use stored::{BLOCK, Stored};
pub(crate) use stored::{same_type, same_type_mut};

/// Runs `f`, compiled for the widest vectors of this CPU (AVX-512, AVX2, NEON, or the target's baseline).
///
/// `f` and everything it calls must be `#[inline(always)]` (a closure takes the attribute too:
/// `vectorized(#[inline(always)] || ..)`). A function that is called instead of inlined is compiled for the target's
/// baseline, and is several times slower.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// The number of independent partial sums: enough for two AVX-512 registers of `f32`, so that additions overlap.
///
/// It is fixed, so that a sum has the same bits for any vector width.
const LANES: usize = 32;

/// Returns the sum over i of `f([a[i], b[i], ..])` for slices of one length, in a fixed order that vectorises.
#[inline(always)]
pub fn sum_over<T: Real, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    let n = slices.first().map_or(0, |slice| slice.len());
    let mut lanes = [T::ZERO; LANES];
    let whole = n / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        // One bounds check per chunk: a check per element would prevent vectorisation of the loop below.
        let chunks: [&[T]; N] = slices.map(|slice| &slice[start..start + LANES]);
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(chunks.map(|chunk| chunk[lane]));
        }
    }
    for (lane, i) in (whole..n).enumerate() {
        lanes[lane] += f(slices.map(|slice| slice[i]));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub fn sum<T: Real>(x: &[T]) -> T {
    sum_over([x], |[x]| x)
}

/// Returns whether no element is NaN or infinite.
pub fn all_finite<T: Real>(x: &[T]) -> bool {
    // `x * 0` is 0 for finite x and NaN otherwise, and a sum never loses a NaN.
    let sum = vectorized(
        #[inline(always)]
        || sum_over([x], |[x]| x * T::ZERO),
    );
    sum == T::ZERO
}

/// Returns the dot product of two slices of one length.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    sum_over([a, b], |[a, b]| a * b)
}

/// Returns the largest element, -inf for an empty slice; NaN if the last element of its lane is NaN.
#[inline(always)]
pub fn max<T: Real>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = lane.larger(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = lane.larger(*value);
    }
    lanes.into_iter().fold(T::NEG_INFINITY, T::larger)
}

/// Returns `min(max(x, -bound), bound)`; NaN stays NaN.
#[inline(always)]
pub fn clamp<T: Real>(x: T, bound: T) -> T {
    match x {
        _ if x > bound => bound,
        _ if x < -bound => -bound,
        _ => x,
    }
}

/// Runs independent fused multiply-adds in f32 on registers for about 10 ms on this thread. Returns their FLOPs, the
/// same number each time.
pub fn multiply_adds() -> u64 {
    const CHAINS: usize = 12; // a latency of 4 times two units, with some margin
    const ROUNDS: usize = 1_000_000;

    struct MultiplyAdds;

    impl pulp::WithSimd for MultiplyAdds {
        type Output = u64;

        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, simd: S) -> u64 {
            let factor = simd.splat_f32s(0.999);
            let term = simd.splat_f32s(0.001);
            let mut registers = [term; CHAINS];
            for _ in 0..ROUNDS {
                for register in &mut registers {
                    *register = simd.mul_add_f32s(*register, factor, term);
                }
            }
            std::hint::black_box(registers);
            (2 * S::F32_LANES * CHAINS * ROUNDS) as u64
        }
    }

    pulp::Arch::new().dispatch(MultiplyAdds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_of_every_length() {
        for n in 0..200usize {
            let x: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
            let exact: f64 = x.iter().sum();
            assert!((sum(&x) - exact).abs() < 1e-12);
            let squares: f64 = x.iter().map(|v| v * v).sum();
            assert!((dot(&x, &x) - squares).abs() < 1e-12);
            assert!(all_finite(&x));
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut y = x.clone();
                y.push(bad);
                assert!(!all_finite(&y));
            }
            assert_eq!(max(&x), x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
