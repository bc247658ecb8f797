//! Shapes at the edge, with dimensions of zero and one; and the elements that masks keep.

use super::case::{Case, DTYPES, KERNEL, Outcome, REFERENCE, elements};
use super::cases::{self, MASKS};
use super::compare::magnitude;
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::KernelPolicy;

/// Checks that output and gradients of `case` are zero or empty.
fn nothing(case: Case, dims: &[usize], policy: KernelPolicy) {
    for dtype in DTYPES {
        let out = case.value(&case.operands(dtype), policy);
        assert_eq!(out.dims(), dims, "{}", case.name);
        assert_eq!(magnitude(&out).max, 0.0, "{}", case.name);
        let Outcome { gradients, .. } = case.run(dtype, policy);
        for (name, gradient) in gradients {
            assert_eq!(magnitude(&gradient).max, 0.0, "{}: d_{name}", case.name);
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn no_rows(#[case] policy: KernelPolicy) {
    nothing(cases::relu(&[0, 3], 1), &[0, 3], policy);
    nothing(cases::swiglu(&[2, 0], 1), &[2, 0], policy);
    nothing(cases::rms_norm(&[2, 0], 5, 1), &[2, 0, 5], policy);
    nothing(cases::layer_norm(&[0], 5, 1), &[0, 5], policy);
    nothing(cases::rope(&[2], 0, 6, 1), &[2, 0, 6], policy);
    nothing(cases::rope_by_halves(&[2], 0, 6, 1), &[2, 0, 6], policy);
    nothing(cases::rope(&[0], 3, 6, 1), &[0, 3, 6], policy);
    nothing(cases::rope_by_halves(&[0], 3, 6, 1), &[0, 3, 6], policy);
    nothing(cases::linear(&[0, 3], 5, 4, 1), &[0, 3, 4], policy);
    nothing(cases::matmul(&[0], [3, 4, 5], 1), &[0, 3, 5], policy);
    nothing(cases::matmul(&[2], [0, 4, 5], 1), &[2, 0, 5], policy);
    nothing(
        cases::matmul_transposed(&[2], [3, 4, 0], 1),
        &[2, 3, 0],
        policy,
    );
    nothing(cases::embedding(&[2, 0], 5, 3, 1), &[2, 0, 3], policy);
    nothing(cases::split_heads([0, 3, 2, 4], 1), &[0, 2, 3, 4], policy);
    nothing(cases::merge_heads([2, 0, 2, 4], 1), &[2, 0, 8], policy);
    for mask in MASKS {
        nothing(
            cases::softmax(&[2], (0, 3), (1.0, 1.0), mask, 1),
            &[2, 0, 3],
            policy,
        );
        nothing(
            cases::softmax(&[0], (3, 3), (1.0, 1.0), mask, 1),
            &[0, 3, 3],
            policy,
        );
        nothing(
            cases::attention(&[0, 2], (3, 3), 4, (None, mask), 1),
            &[0, 2, 3, 4],
            policy,
        );
        nothing(
            cases::attention(&[1, 2], (0, 3), 4, (None, mask), 1),
            &[1, 2, 0, 4],
            policy,
        );
        for (batch, heads, queries) in [(0, 4, 3), (2, 0, 3), (2, 4, 0)] {
            nothing(
                cases::grouped_attention(
                    &[batch],
                    (heads, 2),
                    (queries, 3),
                    (4, 5),
                    (None, mask),
                    1,
                ),
                &[batch, heads, queries, 5],
                policy,
            );
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn no_width(#[case] policy: KernelPolicy) {
    nothing(cases::linear(&[3], 0, 4, 1), &[3, 4], policy);
    nothing(cases::linear(&[3], 5, 0, 1), &[3, 0], policy);
    nothing(cases::matmul(&[2], [3, 0, 5], 1), &[2, 3, 5], policy);
    nothing(
        cases::matmul_transposed(&[2], [3, 0, 5], 1),
        &[2, 3, 5],
        policy,
    );
    nothing(cases::rope(&[2], 3, 0, 1), &[2, 3, 0], policy);
    nothing(cases::rope_by_halves(&[2], 3, 0, 1), &[2, 3, 0], policy);
    nothing(cases::embedding(&[3], 5, 0, 1), &[3, 0], policy);
    nothing(cases::split_heads([2, 3, 4, 0], 1), &[2, 4, 3, 0], policy);
    nothing(cases::merge_heads([2, 3, 4, 0], 1), &[2, 3, 0], policy);
}

/// No leading dimension, for ops that allow it.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn a_single_row(#[case] policy: KernelPolicy) {
    let row = |case: Case, dims: &[usize]| {
        let out = case.run(DType::F64, policy).out;
        assert_eq!(out.dims(), dims, "{}", case.name);
        assert!(magnitude(&out).max > 0.0, "{}", case.name);
    };
    row(cases::relu(&[], 2), &[]);
    row(cases::swiglu(&[], 1), &[]);
    row(cases::rms_norm(&[], 5, 1), &[5]);
    row(cases::layer_norm(&[], 5, 1), &[5]);
    row(cases::rope(&[], 3, 4, 1), &[3, 4]);
    row(cases::rope_by_halves(&[], 3, 4, 1), &[3, 4]);
    row(cases::linear(&[], 5, 4, 1), &[4]);
    row(cases::matmul(&[], [3, 4, 5], 1), &[3, 5]);
    row(cases::embedding(&[], 5, 3, 1), &[3]);
    row(cases::cross_entropy(&[], 5, 1.0, false, 1), &[]);
    row(
        cases::attention(&[], (3, 5), 4, (None, Mask::Causal), 1),
        &[3, 4],
    );
    let vector = Case::new("softmax of a vector", cases::relu(&[5], 1).inputs, |x| {
        tallow::ops::softmax(&x[0], 1.0, Mask::Full)
    });
    row(vector, &[5]);
}

/// More leading dimensions than candle's matmul supports.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn five_dimensions(#[case] policy: KernelPolicy) {
    let make = |leading: &[usize]| {
        [
            cases::matmul(leading, [4, 5, 3], 1),
            cases::matmul_transposed(leading, [4, 5, 3], 1),
        ]
    };
    for (deep, flat) in make(&[2, 1, 3]).into_iter().zip(make(&[6])) {
        let [deep, flat] = [deep, flat].map(|case| case.run(DType::F64, policy));
        assert_eq!(deep.out.dims(), [2, 1, 3, 4, 3]);
        assert_eq!(elements(&deep.out), elements(&flat.out));
        for ((_, deep), (_, flat)) in deep.gradients.iter().zip(&flat.gradients) {
            assert_eq!(elements(deep), elements(flat));
        }
    }
}

/// Masked elements are exactly 0, also in the gradient. Each row that sees a key sums to 1, any other to 0.
#[rstest]
fn masks_leave_what_they_say(
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
) {
    let sizes = [
        (1, 1),
        (1, 7),
        (7, 1),
        (5, 33),
        (33, 5),
        (123, 123),
        (40, 123),
        (123, 40),
    ];
    for (queries, keys) in sizes {
        let seen = |query: usize, key: usize| match mask {
            Mask::Full => true,
            Mask::Causal => key <= query,
            Mask::CausalEnd => key + queries <= query + keys,
            mask => panic!("{mask:?} is not tested"),
        };
        for (scale, dtype) in [(0.5, DType::F32), (-0.5, DType::F64), (0.0, DType::F32)] {
            let case = cases::softmax(&[2], (queries, keys), (scale, 2.0), mask, 3);
            let run = case.run(dtype, policy);
            let (p, dx) = (elements(&run.out), elements(&run.gradients[0].1));
            for (row, (p, dx)) in p.chunks(keys).zip(dx.chunks(keys)).enumerate() {
                let query = row % queries;
                for (key, (p, dx)) in p.iter().zip(dx).enumerate() {
                    let place = format!("{} at {query}, {key}", case.name);
                    assert_eq!(*p > 0.0, seen(query, key), "{place}: {p}");
                    assert!(seen(query, key) || *dx == 0.0, "{place}: gradient {dx}");
                }
                let total: f64 = p.iter().sum();
                let expected = f64::from((0..keys).any(|key| seen(query, key)));
                assert!(
                    (total - expected).abs() < 1e-6,
                    "{}: row {query} sums to {total}",
                    case.name
                );
            }
        }
    }
}
