//! Single passes over a flat buffer: sum of squares, finiteness check, scaling, clamping and accumulation. Gradient
//! clipping, accumulation and loss scaling are built from these.

use super::{
    Real, Stored,
    parallel::{self, TASK_ELEMENTS},
    simd,
    simd::BLOCK,
};
use rayon::prelude::*;

/// Returns the sum of `x^2`, with squares and additions in `f64`, in a fixed order.
///
/// The result is not finite if an element is not, or, for `f64` only, if a square overflows.
pub fn sum_of_squares<T: Stored>(x: &[T]) -> f64 {
    parallel::sum_ranges(x.len(), |range| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut buffer = [T::Wide::ZERO; BLOCK];
                let mut lanes = [0f64; LANES];
                for block in x[range].chunks(BLOCK) {
                    let wide = &mut buffer[..block.len()];
                    T::load(block, wide);
                    let (chunks, rest) = wide.as_chunks::<LANES>();
                    for chunk in chunks {
                        add_squares(&mut lanes, chunk);
                    }
                    add_squares(&mut lanes, rest);
                }
                lanes.iter().sum()
            },
        )
    })
}

/// The number of independent partial sums, so that additions overlap. It is fixed, so that the order of additions is.
const LANES: usize = 32;

#[inline(always)]
fn add_squares<T: Real + Into<f64>>(lanes: &mut [f64; LANES], x: &[T]) {
    for (lane, value) in lanes.iter_mut().zip(x) {
        let value: f64 = (*value).into();
        *lane += value * value;
    }
}

/// Returns whether no element of `x` is infinite or NaN.
pub fn all_finite<T: Stored>(x: &[T]) -> bool {
    x.par_chunks(TASK_ELEMENTS).all(|part| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut buffer = [T::Wide::ZERO; BLOCK];
                let mut finite = true;
                for block in part.chunks(BLOCK) {
                    let wide = &mut buffer[..block.len()];
                    T::load(block, wide);
                    for value in wide.iter() {
                        // 0 * infinity is NaN. `&` instead of `&&`, because branches prevent vectorisation.
                        finite &= *value * T::Wide::ZERO == T::Wide::ZERO;
                    }
                }
                finite
            },
        )
    })
}

/// Computes `x = x * factor`, rounded once.
pub fn scale<T: Stored>(x: &mut [T], factor: f64) {
    let factor = T::Wide::real(factor);
    in_place(x, |value| value * factor);
}

/// Computes `x = min(max(x, -bound), bound)`; NaN stays NaN.
pub fn clamp<T: Stored>(x: &mut [T], bound: f64) {
    let bound = T::Wide::real(bound);
    in_place(x, |value| simd::clamp(value, bound));
}

/// Computes `x = f(x)`, rounded once.
#[inline(always)]
fn in_place<T: Stored>(x: &mut [T], f: impl Fn(T::Wide) -> T::Wide + Sync) {
    parallel::for_rows(x, 1, |_, part| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut buffer = [T::Wide::ZERO; BLOCK];
                for block in part.chunks_mut(BLOCK) {
                    let wide = &mut buffer[..block.len()];
                    T::load(block, wide);
                    for value in wide.iter_mut() {
                        *value = f(*value);
                    }
                    T::store(wide, block);
                }
            },
        );
    });
}

/// Computes `sum = sum + factor * x`; slices of one length. The sum is stored in the compute type.
pub fn add_scaled<T: Stored>(sum: &mut [T::Wide], x: &[T], factor: f64) {
    assert_eq!(sum.len(), x.len());
    let factor = T::Wide::real(factor);
    parallel::for_rows(sum, 1, |first, part| {
        let x = &x[first..first + part.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut buffer = [T::Wide::ZERO; BLOCK];
                for (sum, block) in part.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
                    let wide = &mut buffer[..block.len()];
                    T::load(block, wide);
                    for (sum, value) in sum.iter_mut().zip(wide.iter()) {
                        *sum += factor * *value;
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * 3.0).collect()
    }

    fn bits_with_threads<R: Send>(threads: usize, f: impl Fn() -> R + Send + Sync) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("a pool").install(f)
    }

    #[test]
    fn sum_of_squares_of_every_type_and_odd_sizes() {
        for n in [0, 1, 31, 511, 513, 16_385, 40_001] {
            let x = wave(n);
            let squares = |values: Vec<f64>| values.iter().map(|v| v * v).sum::<f64>();
            let close = |got: f64, want: f64| {
                assert!((got - want).abs() <= 1e-12 * want, "{n}: {got} {want}");
            };
            close(
                sum_of_squares(&x),
                squares(x.iter().map(|v| f64::from(*v)).collect()),
            );
            let doubles: Vec<f64> = x.iter().map(|v| f64::from(*v) / 3.0).collect();
            close(sum_of_squares(&doubles), squares(doubles.clone()));
            let halves: Vec<f16> = x.iter().map(|v| f16::from_f32(*v)).collect();
            close(
                sum_of_squares(&halves),
                squares(halves.iter().map(|v| v.to_f64()).collect()),
            );
            let brains: Vec<bf16> = x.iter().map(|v| bf16::from_f32(*v)).collect();
            close(
                sum_of_squares(&brains),
                squares(brains.iter().map(|v| v.to_f64()).collect()),
            );
        }
    }

    #[test]
    fn the_same_bits_for_any_number_of_threads() {
        let x = wave(100_003);
        let one = bits_with_threads(1, || sum_of_squares(&x).to_bits());
        for threads in [2, 3] {
            assert_eq!(
                one,
                bits_with_threads(threads, || sum_of_squares(&x).to_bits())
            );
        }
    }

    #[test]
    fn one_bad_element_is_found_wherever_it_is() {
        for n in [1, 513, 20_000] {
            for at in [0, n / 2, n - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = wave(n);
                    x[n / 2] = f32::MAX;
                    assert!(all_finite(&x));
                    x[at] = bad;
                    assert!(!all_finite(&x), "{bad} at {at} of {n}");
                    let narrow: Vec<bf16> = x.iter().map(|v| bf16::from_f32(*v)).collect();
                    assert!(!all_finite(&narrow));
                }
            }
        }
        assert!(all_finite::<f32>(&[]));
    }

    #[test]
    fn scale_and_add_scaled_round_once() {
        for n in [1, 513, 20_001] {
            let x = wave(n);
            let mut scaled = x.clone();
            scale(&mut scaled, 0.3);
            let mut sum = wave(n);
            add_scaled(&mut sum, &x, 2.0);
            let brains: Vec<bf16> = x.iter().map(|v| bf16::from_f32(*v)).collect();
            let mut brains_scaled = brains.clone();
            scale(&mut brains_scaled, 0.3);
            let mut brain_sum = vec![1f32; n];
            add_scaled(&mut brain_sum, &brains, 2.0);
            for i in 0..n {
                assert_eq!(scaled[i], x[i] * 0.3f32);
                assert_eq!(sum[i], x[i] + 2.0 * x[i]);
                assert_eq!(
                    brains_scaled[i],
                    bf16::from_f32(brains[i].to_f32() * 0.3f32)
                );
                assert_eq!(brain_sum[i], 1.0 + 2.0 * brains[i].to_f32());
            }
        }
    }
}
