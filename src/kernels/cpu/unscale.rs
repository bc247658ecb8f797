//! Undoing of loss scaling: gradients are multiplied by the inverse scale, and checked for infinities and NaN in the
//! same pass.
//!
//! It is elementwise, so neither vector width nor thread count changes a bit. It is memory-bound: in `f32` it reads 4
//! bytes per element and writes 4, no more than scaling alone.

use super::{Real, Stored, parallel::TASK_ELEMENTS, simd, simd::BLOCK};
use rayon::prelude::*;

/// Computes `x = x * factor`, rounded once. Returns whether all results are finite.
///
/// All of `x` is multiplied even if one is not.
pub fn in_place<T: Stored>(x: &mut [T], factor: f64) -> bool {
    let factor = T::Wide::real(factor);
    x.par_chunks_mut(TASK_ELEMENTS)
        .map(|part| {
            simd::vectorized(
                #[inline(always)]
                || {
                    if let Some(wide) = T::as_wide_mut(part) {
                        return multiply(wide, factor);
                    }
                    let mut buffer = [T::Wide::ZERO; BLOCK];
                    let mut finite = true;
                    for block in part.chunks_mut(BLOCK) {
                        let wide = &mut buffer[..block.len()];
                        T::load(block, wide);
                        finite &= multiply(wide, factor);
                        T::store(wide, block);
                    }
                    finite
                },
            )
        })
        .reduce(|| true, |a, b| a & b)
}

/// Computes `y = x * factor` in the compute type, for gradients so small that their own type would lose them; slices of
/// one length. Returns whether all results are finite.
pub fn widening<T: Stored>(x: &[T], factor: f64, y: &mut [T::Wide]) -> bool {
    assert_eq!(x.len(), y.len());
    let factor = T::Wide::real(factor);
    y.par_chunks_mut(TASK_ELEMENTS)
        .zip(x.par_chunks(TASK_ELEMENTS))
        .map(|(y, x)| {
            simd::vectorized(
                #[inline(always)]
                || {
                    let mut finite = true;
                    for (y, x) in y.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
                        T::load(x, y);
                        finite &= multiply(y, factor);
                    }
                    finite
                },
            )
        })
        .reduce(|| true, |a, b| a & b)
}

/// Multiplies in place and returns whether all results are finite. The check is of the results, not the inputs: a
/// finite result means that the input was finite and did not overflow (a scale under 1 enlarges gradients).
#[inline(always)]
fn multiply<T: Real>(x: &mut [T], factor: T) -> bool {
    let mut finite = true;
    for value in x {
        *value *= factor;
        // 0 * infinity is NaN. `&` instead of `&&`, because branches prevent vectorisation.
        finite &= *value * T::ZERO == T::ZERO;
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn wave<T: Stored>(n: usize) -> Vec<T> {
        (0..n)
            .map(|i| T::from_f64((i as f64 * 0.37).sin() * 3.0))
            .collect()
    }

    /// Checks that a bad element is found anywhere, and that every element is the product, rounded once.
    fn check<T: Stored>(factor: f64) {
        let product = |v: T| {
            let exact = T::Wide::real(factor) * T::Wide::real(v.to_f64());
            (T::from_f64(exact.into()), exact)
        };
        for n in [0, 1, 511, 513, 16_384, 40_001] {
            let x = wave::<T>(n);
            let mut y = x.clone();
            assert!(in_place(&mut y, factor));
            let mut wide = vec![T::Wide::ZERO; n];
            assert!(widening(&x, factor, &mut wide));
            for i in 0..n {
                let (narrow, exact) = product(x[i]);
                assert!(y[i] == narrow && wide[i] == exact, "{i} of {n}");
            }
            for at in [0, n / 2, n.saturating_sub(1)] {
                for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    let mut x = x.clone();
                    let Some(element) = x.get_mut(at) else {
                        continue;
                    };
                    *element = T::from_f64(bad);
                    assert!(!widening(&x, factor, &mut wide), "{bad} at {at} of {n}");
                    assert!(!in_place(&mut x, factor), "{bad} at {at} of {n}");
                    let mut others = (0..n).filter(|i| *i != at);
                    assert!(others.all(|i| x[i] == y[i]), "all are multiplied");
                }
            }
        }
    }

    #[test]
    fn every_type_and_odd_sizes() {
        check::<f32>(1.0 / 65536.0);
        check::<f64>(0.3);
        check::<f16>(0.3);
        check::<bf16>(1.0 / 65536.0);
    }

    #[test]
    fn a_product_that_overflows_is_found() {
        assert!(!in_place(&mut [1f32, 1e38], 4.0));
        assert!(in_place(&mut [1f32, 1e38], 2.0));
        assert!(!widening(&[f16::MAX], 1e36, &mut [0f32]));
    }

    #[test]
    fn widening_keeps_what_f16_would_lose() {
        let mut y = [0f32];
        assert!(widening(&[f16::from_f32(1e-4)], 2f64.powi(-16), &mut y));
        assert_eq!(y[0], f16::from_f32(1e-4).to_f32() * 2f32.powi(-16));
        assert_eq!(f16::from_f32(y[0]), f16::ZERO);
    }
}
