//! f16 and bf16, which run the references: the input's dtype comes out, a rounding away from the exact result, and
//! gradients flow.

use super::case::{Case, numbers};
use super::cases::{self, MASKS};
use super::compare::{assert_close, epsilon};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::{self, KernelPolicy};

fn cases() -> Vec<Case> {
    let mut cases = vec![
        cases::relu(&[3, 41], 1),
        cases::swiglu(&[3, 41], 2),
        cases::rms_norm(&[33], 65, 3),
        cases::layer_norm(&[33], 65, 4),
        cases::rope(&[2], 33, 24, 5),
        cases::linear(&[33], 65, 41, 6),
        cases::matmul(&[2], [33, 65, 41], 7),
        cases::matmul_transposed(&[2], [33, 65, 41], 8),
        cases::embedding(&[33], 41, 17, 9),
        cases::split_heads([2, 7, 3, 4], 10),
        cases::merge_heads([2, 7, 3, 4], 11),
        cases::cross_entropy(&[33], 65, 2.0, false, 12),
        cases::cross_entropy(&[33], 65, 2.0, true, 13),
    ];
    for mask in MASKS {
        cases.push(cases::softmax(&[2], (33, 41), (0.5, 2.0), mask, 14));
        cases.push(cases::softmax(&[2], (41, 33), (-0.5, 2.0), mask, 15));
        cases.push(cases::attention(&[1, 2], (33, 41), 24, (None, mask), 16));
        let how = (None, mask);
        cases.push(cases::grouped_attention(
            &[1],
            (8, 2),
            (33, 41),
            (24, 24),
            how,
            17,
        ));
    }
    cases
}

/// How many roundings of half a unit each lie between the exact result and ours: (of the output, of the gradients).
fn roundings(case: &Case) -> (f64, f64) {
    match case.name.split(' ').next() {
        // Scores, probabilities and the output each come in half precision; so do their gradients.
        Some("attention") => (3.0, 6.0),
        // The rows of a repeated id are added in half precision.
        Some("embedding") => (1.0, 8.0),
        // The rest computes in f32 and rounds once.
        _ => (1.0, 1.0),
    }
}

#[rstest]
#[case(DType::F16)]
#[case(DType::BF16)]
fn results_are_rounded_once(#[case] dtype: DType) {
    for case in cases() {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, KernelPolicy::Reference);
        let half = case.run(dtype, KernelPolicy::Prefer);
        let is_loss = case.name.starts_with("cross_entropy");
        let expected = if is_loss { DType::F32 } else { dtype };
        assert_eq!(half.out.dtype(), expected, "{}", case.name);
        let (of_out, of_gradients) = roundings(&case);
        let limit = |dtype, count| count * 0.5 * epsilon(dtype) + 8.0 * epsilon(DType::F32);
        assert_close(&case.name, &half.out, &exact.out, limit(expected, of_out));
        for ((name, half), (_, exact)) in half.gradients.iter().zip(&exact.gradients) {
            assert_eq!(half.dtype(), dtype, "{}: d_{name}", case.name);
            let what = format!("{}: d_{name}", case.name);
            assert_close(&what, half, exact, limit(dtype, of_gradients));
        }
    }
}

/// 4096 ones in bf16: adding them up in bf16 would stop at 256.
#[test]
fn sums_are_taken_in_f32() {
    let ones = Tensor::ones((1, 4096), DType::BF16, &Device::Cpu).unwrap();
    let weight = Tensor::ones((1, 4096), DType::BF16, &Device::Cpu).unwrap();
    let number = |x: Tensor| numbers(&x);
    assert_eq!(number(ops::linear(&ones, &weight).unwrap()), [4096.0]);
    assert_eq!(
        number(ops::softmax(&ones, 1.0, Mask::Full).unwrap()),
        [1.0 / 4096.0; 4096]
    );
    let norm = ops::rms_norm(&ones, &weight.squeeze(0).unwrap(), 0.0).unwrap();
    assert_eq!(number(norm), [1.0; 4096]);
    let target = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
    let loss = number(ops::cross_entropy(&ones, &target).unwrap())[0];
    assert!((loss - 4096f64.ln()).abs() < 1e-5, "{loss}");
}
