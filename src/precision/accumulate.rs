//! Rounding errors of sums in low precision, and algorithms that reduce them.
//!
//! Each addition is rounded to the type of the accumulator. A sum stops growing when a term is less than half of the
//! distance to the next number: adding 0.01 repeatedly in bf16 never exceeds 4. Three things help: a wider accumulator
//! (used by this crate's kernels and by PyTorch's matmuls), compensation of the error ([`kahan_sum`]), and adding
//! numbers of similar size ([`pairwise_sum`]).
//!
//! Terms and accumulator may have different types: `running_sum::<f32, f16>` sums f16 terms in f32. A term is converted
//! to the accumulator's type first, which is exact if that is the wider one.
//!
//! These functions are for experiments and sum sequentially; [`ops::sum`](crate::ops::sum()) is for tensors.
//!
//! ```
//! use half::f16;
//! use tallow::precision::accumulate::{kahan_sum, running_sum};
//!
//! let terms = [f16::from_f32(0.01); 1000]; // 0.01000214 in f16
//! assert_eq!(running_sum::<f16, _>(&terms).to_f32(), 9.953125);
//! assert_eq!(kahan_sum::<f16, _>(&terms).to_f32(), 10.0); // 10.0021 rounded to f16
//! assert_eq!(running_sum::<f32, _>(&terms), 10.002136);
//! # Ok::<(), tallow::Error>(())
//! ```

use candle_core::FloatDType;

/// Sums the terms in order: `sum += term`.
///
/// The error grows with the number of terms: up to `(n - 1) u sum |term|`, where u is half of the type's epsilon.
pub fn running_sum<A: FloatDType, T: FloatDType>(terms: &[T]) -> A {
    running_sums(terms).last().unwrap_or(A::zero())
}

/// Returns the partial sums of [`running_sum`], after each term.
pub fn running_sums<A: FloatDType, T: FloatDType>(terms: &[T]) -> impl Iterator<Item = A> {
    terms.iter().scan(A::zero(), |sum, term| {
        *sum += convert::<A, T>(*term);
        Some(*sum)
    })
}

/// Sums the terms in order and adds the rounding error of each addition to the next term (compensated summation).
///
/// The error is at most `(2 u + O(n u^2)) sum |term|`, almost independent of the number of terms. It needs four
/// additions for each term.
///
/// Kahan, "Pracniques: further remarks on reducing truncation errors", 1965.
pub fn kahan_sum<A: FloatDType, T: FloatDType>(terms: &[T]) -> A {
    let (mut sum, mut lost) = (A::zero(), A::zero());
    for term in terms {
        let term = convert::<A, T>(*term) - lost;
        let next = sum + term;
        lost = (next - sum) - term; // what the addition above added too much
        sum = next;
    }
    sum
}

/// Sums the first half and the second half recursively and adds both.
///
/// The error grows with the logarithm of the number of terms: up to `log2(n) u sum |term|`. It needs as many additions
/// as [`running_sum`]; a parallel reduction has this order.
///
/// Higham, "The accuracy of floating point summation", 1993, section 3.
pub fn pairwise_sum<A: FloatDType, T: FloatDType>(terms: &[T]) -> A {
    match terms {
        [] => A::zero(),
        [term] => convert(*term),
        _ => {
            let (first, second) = terms.split_at(terms.len() / 2);
            pairwise_sum::<A, T>(first) + pairwise_sum::<A, T>(second)
        }
    }
}

fn convert<A: FloatDType, T: FloatDType>(term: T) -> A {
    A::from_f64(term.to_f64())
}
