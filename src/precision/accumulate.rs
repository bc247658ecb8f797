//! What a sum loses when it is kept in few bits, and two ways to lose less.
//!
//! Every addition is rounded to the accumulator's type. Once the sum is so large that a term is less than half of the
//! distance to the next number, the sum no longer changes: adding 0.01 to a bf16 sum never gets past 4. What helps is a
//! wider accumulator (as in this crate's kernels and PyTorch's products), carrying the lost part along ([`kahan_sum`]),
//! or adding numbers of similar size ([`pairwise_sum`]).
//!
//! Terms and accumulator have types of their own: `running_sum::<f32, f16>` sums f16 terms in f32. A term is converted
//! to the accumulator's type before it is added, which is exact where that is the wider one.
//!
//! These are for measuring and explaining, one addition after another; [`ops::sum`](crate::ops::sum()) is for tensors.
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

/// The terms one after another into one accumulator: `sum += term`.
///
/// The error grows with the number of terms: up to `(n - 1) u sum |term|`, where u is half of the type's epsilon.
pub fn running_sum<A: FloatDType, T: FloatDType>(terms: &[T]) -> A {
    running_sums(terms).last().unwrap_or(A::zero())
}

/// The sum after each term: what [`running_sum`] goes through.
pub fn running_sums<A: FloatDType, T: FloatDType>(terms: &[T]) -> impl Iterator<Item = A> {
    terms.iter().scan(A::zero(), |sum, term| {
        *sum += convert::<A, T>(*term);
        Some(*sum)
    })
}

/// As [`running_sum`], carrying the rounding error of each addition into the next.
///
/// The error is that of rounding the result, however many terms there are (`2 u sum |term|`, and u^2 n beside it), for
/// four additions a term.
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

/// The sum of the first half plus the sum of the second, and so on down to single terms.
///
/// The error grows with the logarithm of the number of terms: up to `log2(n) u sum |term|`. As many additions as
/// [`running_sum`], and none waits for the one before: what a parallel reduction does.
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
