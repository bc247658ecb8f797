//! Vector code without intrinsics: loops that the compiler vectorises, compiled once for each instruction set and
//! chosen when the program runs.

use super::Real;

/// Runs `f` compiled for the widest vectors this CPU has (AVX-512, AVX2, NEON, or the target's baseline).
///
/// Whatever `f` calls must be `#[inline(always)]`, or it is compiled for the baseline.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Partial sums kept side by side: enough for two AVX-512 registers of `f32`, so that additions overlap.
///
/// Fixed, so that a sum has the same bits whatever the vector width.
const LANES: usize = 32;

/// The sum over i of `f([a[i], b[i], ..])` for slices of one length, in a fixed order that vectorises.
#[inline(always)]
pub fn sum_over<T: Real, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    let n = slices.first().map_or(0, |slice| slice.len());
    let mut lanes = [T::ZERO; LANES];
    let whole = n / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        // One bounds check a chunk: checks an element would keep the loop below from vectorising.
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

/// The sum of a slice.
#[inline(always)]
pub fn sum<T: Real>(x: &[T]) -> T {
    sum_over([x], |[x]| x)
}

/// The inner product of two slices of one length.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    sum_over([a, b], |[a, b]| a * b)
}

/// The largest element, minus infinity for an empty slice; NaN if the last of its lane is.
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

/// FLOP/s of every thread of the pool running independent fused multiply-adds on registers; the best of several
/// tries.
pub fn measure_multiply_add_rate<T: Real>() -> f64 {
    const CHAINS: usize = 16; // latency 4, two units: 8 would do
    const WIDTH: usize = 16; // one AVX-512 register of f32, two of f64
    const ROUNDS: usize = 200_000;

    #[inline(always)]
    fn chains<T: Real>() -> T {
        let factor = T::real(0.999);
        let term = T::real(0.001);
        let mut registers = [[T::ONE; WIDTH]; CHAINS];
        for _ in 0..ROUNDS {
            for register in &mut registers {
                for value in register {
                    *value = value.multiply_add(factor, term);
                }
            }
        }
        registers.iter().flatten().fold(T::ZERO, |sum, v| sum + *v)
    }

    let flops = (2 * CHAINS * WIDTH * ROUNDS) as f64;
    (0..10)
        .map(|_| {
            let rates = rayon::broadcast(|_| {
                let start = std::time::Instant::now();
                std::hint::black_box(vectorized(chains::<T>));
                flops / start.elapsed().as_secs_f64()
            });
            rates.iter().sum::<f64>()
        })
        .fold(0.0, f64::max)
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
            assert_eq!(max(&x), x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
