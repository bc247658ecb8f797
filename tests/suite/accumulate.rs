//! Sums in low precision: the rows that `examples/mixed_precision_accumulation` prints, and the sums themselves.
//! Expected sums were computed with PyTorch 2.15, by the same loops on 0-dimensional tensors.

#[path = "../../examples/mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::FloatDType;
use half::{bf16, f16};
use proptest::prelude::*;
use tallow::precision::accumulate::{kahan_sum, pairwise_sum, running_sum, running_sums};

#[test]
fn the_sums_to_eight_decimals() {
    let expected = [
        ("f32", "f32", "10.00013351"), // this one and the next three are the exercise's
        ("f16", "f16", "9.95312500"),
        ("f32", "f16", "10.00213623"),
        ("f32", "f16, cast to f32", "10.00213623"),
        ("bf16", "bf16", "4.00000000"),
        ("f32", "bf16", "10.00976562"),
    ];
    let rows = rows::rows(0.01, 1000);
    assert_eq!(rows.len(), expected.len());
    for (row, (accumulator, terms, sum)) in rows.iter().zip(expected) {
        assert_eq!((row.accumulator, row.terms), (accumulator, terms));
        assert_eq!(format!("{:.8}", row.sum), sum);
    }
}

/// Kahan's and the pairwise sum have at most the rounding error of the result.
#[test]
fn kahans_and_the_pairwise_sum_are_exact_to_eight_decimals() {
    fn check<T: FloatDType>() {
        let terms = vec![T::from_f64(0.01); 1000];
        for sum in [kahan_sum::<T, T>, pairwise_sum::<T, T>] {
            assert_eq!(format!("{:.8}", sum(&terms).to_f64()), "10.00000000");
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// The error is the sum of those of terms and additions, and its cause is the larger one.
#[test]
fn every_error_has_its_cause() {
    let rows = rows::rows(0.01, 1000);
    for row in &rows {
        let parts = row.error_of_terms + row.error_of_additions;
        assert!((row.error - parts).abs() < 1e-12);
        assert!((row.error - (row.sum - 10.0)).abs() < 1e-12);
        assert!((row.error_percent - 10.0 * row.error).abs() < 1e-9);
    }
    let causes = |value: f64, count: usize| -> Vec<String> {
        let rows = rows::rows(value, count).into_iter();
        rows.map(|row| row.cause).collect()
    };
    let expected = vec![
        "rounded additions",
        "rounded additions",
        "rounded terms",
        "rounded terms",
        "unchanged after 350",
        "rounded terms",
    ];
    assert_eq!(causes(0.01, 1000), expected);
    assert_eq!(causes(70.0, 1000)[1], "overflow");
}

/// bf16 reaches 4 at its 350th addition and stays there, because 0.01 is less than half the distance to its next
/// number.
#[test]
fn a_sum_that_stands_still_is_found() {
    let terms = [bf16::from_f32(0.01); 1000];
    let sums: Vec<f32> = running_sums::<bf16, _>(&terms).map(f32::from).collect();
    let rows = rows::rows(0.01, 1000);
    let at = rows[4].last_change.unwrap();
    assert_eq!(at, 350);
    assert!(sums[at - 2] < 4.0); // after 349 additions
    assert!(sums[at - 1..].iter().all(|sum| *sum == 4.0));
    for moving in [0, 1, 2, 3, 5] {
        assert_eq!(rows[moving].last_change, None, "{moving}");
    }
}

#[test]
fn answers_follow_the_sums() {
    let text = |value: f64, count: usize| {
        let answers = rows::answers(&rows::rows(value, count)).into_iter();
        let text: Vec<String> = answers.map(|answer| answer.answer).collect();
        text.join(" ")
    };
    let exercise = text(0.01, 1000);
    for part in [
        "f16 terms in f16: 9.95312500 (-0.4688%); each addition is rounded to f16, whose numbers near the sum are \
         0.0078125 apart.",
        "the term is stored as 0.0100021362.",
        "Casting the terms to f32 first gives the same sum",
        "the 350th addition is the last that changes the sum: 0.0100 is less than half of 0.03125",
        "which is why matmuls in half precision accumulate in f32",
    ] {
        assert!(exercise.contains(part), "{part}: {exercise}");
    }
    // A value that every dtype represents, summed without an error.
    let exact = text(0.5, 100);
    assert!(exact.contains("no error is left"), "{exact}");
    assert!(exact.contains("is no nearer"), "{exact}");
    assert!(!exact.contains("which is why"), "{exact}");
}

#[test]
fn sums_of_nothing_and_of_one() {
    fn check<A: FloatDType + std::fmt::Debug>() {
        let none: [f32; 0] = [];
        let one = A::from_f64(f64::from(0.3f32));
        for sum in [
            running_sum::<A, f32>,
            kahan_sum::<A, f32>,
            pairwise_sum::<A, f32>,
        ] {
            assert_eq!(sum(&none), A::zero());
            assert_eq!(sum(&[0.3]), one);
        }
        assert_eq!(running_sums::<A, f32>(&none).count(), 0);
    }
    check::<f32>();
    check::<f64>();
    check::<f16>();
    check::<bf16>();
}

proptest! {
    /// Each sum keeps its error bound, in u = half of the type's epsilon.
    #[test]
    fn bounds_hold(terms in prop::collection::vec(-10f32..10.0, 1..300)) {
        fn check<A: FloatDType>(terms: &[f32], u: f64) -> Result<(), TestCaseError> {
            let terms: Vec<A> = terms.iter().map(|term| A::from_f64(f64::from(*term))).collect();
            let exact: f64 = terms.iter().map(|term| term.to_f64()).sum();
            let magnitude: f64 = terms.iter().map(|term| term.to_f64().abs()).sum();
            let n = terms.len() as f64;
            let gamma = |k: f64| k * u / (1.0 - k * u) * magnitude + 1e-12;
            for (sum, bound) in [
                (running_sum::<A, A>(&terms), gamma(n - 1.0)),
                (pairwise_sum::<A, A>(&terms), gamma(n.log2().ceil())),
                (kahan_sum::<A, A>(&terms), (2.0 * u + 8.0 * n * u * u) * magnitude + 1e-12),
            ] {
                let error = (sum.to_f64() - exact).abs();
                prop_assert!(error <= bound, "{} {} {}", A::DTYPE.as_str(), error, bound);
            }
            Ok(())
        }
        check::<f32>(&terms, f64::from(f32::EPSILON) / 2.0)?;
        check::<f16>(&terms, f16::EPSILON.to_f64() / 2.0)?;
        check::<bf16>(&terms[..terms.len().min(100)], bf16::EPSILON.to_f64() / 2.0)?;
    }
}
