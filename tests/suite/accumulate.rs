//! Sums in low precision: the rows that `examples/mixed_precision_accumulation` prints, and the sums themselves.
//! Expected sums were computed with PyTorch 2.15, by the same loops on 0-dimensional tensors.

#[path = "../../examples/mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::FloatDType;
use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::Value;
use tallow::precision::accumulate::{kahan_sum, pairwise_sum, running_sum, running_sums};
use tallow::report::Fields;

fn text<'r>(row: &'r Fields, key: &str) -> &'r str {
    row.get(key).and_then(Value::as_str).unwrap()
}

fn number(row: &Fields, key: &str) -> f64 {
    row.get(key).and_then(Value::as_f64).unwrap()
}

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
    let rows = rows::rows();
    assert_eq!(rows.len(), expected.len());
    for (row, (accumulator, terms, sum)) in rows.iter().zip(expected) {
        assert_eq!(
            (text(row, "accumulator"), text(row, "terms")),
            (accumulator, terms)
        );
        assert_eq!(format!("{:.8}", number(row, "sum")), sum);
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
    let rows = rows::rows();
    for row in &rows {
        let parts = ["error_of_terms", "error_of_additions"].map(|key| number(row, key));
        let error = number(row, "sum") - 10.0;
        assert!((error - parts[0] - parts[1]).abs() < 1e-12);
        assert!((number(row, "error_percent") - 10.0 * error).abs() < 1e-9);
        let is_of_terms = parts[0].abs() >= parts[1].abs();
        assert_eq!(
            text(row, "cause") == "rounded terms",
            is_of_terms,
            "{row:?}"
        );
    }
    let causes = rows.each_ref().map(|row| text(row, "cause"));
    assert_eq!(causes[..2], ["rounded additions"; 2]);
    assert_eq!(causes[4], "unchanged after 350");
}

/// bf16 reaches 4 at its 350th addition and stays there, because 0.01 is less than half the distance to its next
/// number. The other sums grow to their end.
#[test]
fn the_sum_in_bf16_stands_still_after_350_additions() {
    fn last_change<A: FloatDType, T: FloatDType>() -> usize {
        let sums: Vec<A> = running_sums::<A, T>(&[T::from_f64(0.01); 1000]).collect();
        let changes = sums.windows(2).rposition(|pair| pair[0] != pair[1]);
        changes.unwrap() + 2
    }
    assert_eq!(last_change::<bf16, bf16>(), 350);
    let terms = [bf16::from_f32(0.01); 350];
    assert!(running_sum::<bf16, _>(&terms[1..]).to_f32() < 4.0);
    assert_eq!(running_sum::<bf16, _>(&terms).to_f32(), 4.0);
    let others = [
        last_change::<f32, f32>(),
        last_change::<f16, f16>(),
        last_change::<f32, f16>(),
        last_change::<f32, bf16>(),
    ];
    assert_eq!(others, [1000; 4]);
}

#[test]
fn answers_follow_the_sums() {
    let rows = rows::rows();
    let [four, bf16_sums] = rows::answers(&rows).map(|own| own.answer);
    let (half, brain) = (f16::from_f64(0.01), bf16::from_f64(0.01));
    let [single, half_sum, mixed, _, narrow, wide] = rows.each_ref().map(|row| {
        let [terms, accumulator] = ["terms", "accumulator"].map(|key| text(row, key));
        let [sum, percent] = ["sum", "error_percent"].map(|key| number(row, key));
        format!("{terms} terms in {accumulator}: {sum:.8} ({percent:+.4}%); ")
    });
    for part in [
        format!("{single}each addition is rounded to f32"),
        format!("near the sum are {:.2e} apart", 8.0 * f32::EPSILON), // 8 to 16 has one exponent
        format!("{half_sum}each addition is rounded to f16"),
        format!("near the sum are {} apart", f16::EPSILON.to_f64() * 8.0),
        format!("{mixed}the term is stored as {:.10}", half.to_f64()),
        "Casting the terms to f32 first gives the same sum".into(),
    ] {
        assert!(four.contains(&part), "{part}: {four}");
    }
    assert_eq!(rows[2].get("sum"), rows[3].get("sum"));
    let spacing = bf16::EPSILON.to_f64() * 4.0; // 4 to 8 has one exponent
    assert!(brain.to_f64() < spacing / 2.0);
    for part in [
        format!("{narrow}the 350th addition is the last that changes the sum"),
        format!("{:.4} is less than half of {spacing}", brain.to_f64()),
        format!("{wide}the term is stored as {:.10}", brain.to_f64()),
        "which is why matmuls in half precision accumulate in f32".into(),
    ] {
        assert!(bf16_sums.contains(&part), "{part}: {bf16_sums}");
    }
    let [narrow, wide] = [&rows[4], &rows[5]].map(|row| number(row, "error_percent"));
    assert!(wide.abs() < narrow.abs());
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
