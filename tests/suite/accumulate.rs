//! Sums in few bits: the numbers of `examples/mixed_precision_accumulation`, from the rows that it prints, and the sums
//! themselves. The expected ones were computed with PyTorch 2.15, by the same loops on 0-dimensional tensors.

#[path = "../../examples/mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::FloatDType;
use half::{bf16, f16};
use proptest::prelude::*;
use tallow::precision::accumulate::{kahan_sum, pairwise_sum, running_sum, running_sums};
use tallow::report::Fields;

fn text<'a>(row: &'a Fields, key: &str) -> &'a str {
    row.get(key).and_then(|value| value.as_str()).unwrap()
}

fn number(row: &Fields, key: &str) -> f64 {
    row.get(key).and_then(|value| value.as_f64()).unwrap()
}

#[test]
fn the_sums_to_eight_decimals() {
    let expected = [
        ("f32", "f32", "one by one", "10.00013351"), // the exercise's four
        ("f16", "f16", "one by one", "9.95312500"),
        ("f32", "f16", "one by one", "10.00213623"),
        ("f32", "f16, cast to f32", "one by one", "10.00213623"),
        ("bf16", "bf16", "one by one", "4.00000000"),
        ("f32", "bf16", "one by one", "10.00976562"),
        ("f32", "f32", "Kahan", "10.00000000"),
        ("f16", "f16", "Kahan", "10.00000000"),
        ("bf16", "bf16", "Kahan", "10.00000000"),
        ("f32", "f32", "pairwise", "10.00000000"),
        ("f16", "f16", "pairwise", "10.00000000"),
        ("bf16", "bf16", "pairwise", "10.00000000"),
    ];
    let rows = rows::rows(0.01, 1000);
    let got: Vec<_> = rows
        .iter()
        .map(|row| {
            let sum = format!("{:.8}", number(row, "sum"));
            (
                text(row, "accumulator"),
                text(row, "terms"),
                text(row, "method"),
                sum,
            )
        })
        .collect();
    assert_eq!(got.len(), expected.len());
    for (got, (accumulator, terms, method, sum)) in got.iter().zip(expected) {
        assert_eq!(*got, (accumulator, terms, method, sum.to_string()));
    }
}

/// The error is the terms' and the additions' together, and its cause is the larger part's.
#[test]
fn every_error_has_its_cause() {
    let rows = rows::rows(0.01, 1000);
    for row in &rows {
        let parts = number(row, "error_of_terms") + number(row, "error_of_additions");
        assert!((number(row, "error") - parts).abs() < 1e-12);
        assert!((number(row, "error") - (number(row, "sum") - 10.0)).abs() < 1e-12);
        assert!((number(row, "error_percent") - 10.0 * number(row, "error")).abs() < 1e-9);
    }
    let causes: Vec<&str> = rows.iter().map(|row| text(row, "cause")).collect();
    let expected = [
        "1000 additions are each rounded to f32, the last to a multiple of 9.54e-7",
        "1000 additions are each rounded to f16, the last to a multiple of 0.0078125",
        "the term is 0.0100021362 in f16",
        "the term is 0.0100021362 in f16",
        "stands still from addition 350 on, where bf16 has a number every 0.03125",
        "the term is 0.0100097656 in bf16",
        "none: the terms' sum, 9.99999978, rounds to it",
        "none: the terms' sum, 10.00213623, rounds to it",
        "none: the terms' sum, 10.00976562, rounds to it",
        "none: the terms' sum, 9.99999978, rounds to it",
        "none: the terms' sum, 10.00213623, rounds to it",
        "none: the terms' sum, 10.00976562, rounds to it",
    ];
    assert_eq!(causes, expected);
    // Other numbers have other causes.
    let causes = |value: f64, count: usize| -> Vec<String> {
        let rows = rows::rows(value, count);
        rows.iter()
            .map(|row| text(row, "cause").to_string())
            .collect()
    };
    assert_eq!(causes(70.0, 1000)[1], "past the largest number of f16");
    assert_eq!(
        causes(1.0, 1001)[8],
        "the result is rounded to bf16, to a multiple of 4"
    );
    // What Kahan leaves is at most the rounding of the result.
    for row in &rows[6..9] {
        let spacing = match text(row, "accumulator") {
            "f32" => f32::EPSILON.into(),
            "f16" => f16::EPSILON.to_f64(),
            _ => bf16::EPSILON.to_f64(),
        };
        assert!(number(row, "error_of_additions").abs() <= 8.0 * spacing / 2.0);
    }
}

/// 4 is where bf16 stands still: 0.01 is under half of the distance to its next number.
#[test]
fn a_sum_that_stands_still_is_found() {
    let terms = [bf16::from_f32(0.01); 1000];
    let sums: Vec<f32> = running_sums::<bf16, _>(&terms).map(f32::from).collect();
    let rows = rows::rows(0.01, 1000);
    let at = number(&rows[4], "stopped_at") as usize;
    assert!(at > 100 && at < 900, "{at}");
    assert!(sums[at - 2] < 4.0);
    assert!(sums[at - 1..].iter().all(|sum| *sum == 4.0));
    for moving in [0, 1, 2, 3, 5] {
        assert!(
            rows[moving].get("stopped_at").unwrap().is_null(),
            "{moving}"
        );
    }
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
    /// Each sum keeps its bound, in u = half of the type's epsilon.
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
