//! f16 and bf16: kernels and references compute in f32 and round once; and mixtures of half precision with f32.

use super::case::{Case, KERNEL, Outcome, REFERENCE, cast, elements};
use super::cases::{self, MASKS};
use super::compare::assert_rounded_once;
use super::every;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::{self, Gelu, KernelPolicy, with_kernel_policy};

/// Returns ops with half-precision kernels on odd sizes: one element, less than a conversion block, and more.
fn cases() -> Vec<Case> {
    let mut cases = vec![
        cases::relu(&[1], 1),
        cases::relu(&[3, 1031], 1),
        cases::swiglu(&[3, 1031], 2),
        cases::geglu(Gelu::Erf, &[3, 1031], 2),
        cases::geglu(Gelu::Tanh, &[3, 1031], 2),
        cases::soft_cap(&[3, 1031], 2.0, 2),
        cases::rope(&[2], 33, 24, 5),
        cases::rope_by_halves(&[2], 33, 24, 5),
        cases::rope(&[3], 123, 40, 5), // blocks end inside rows
        cases::rope_by_halves(&[3], 123, 40, 5), // blocks end inside rows
        cases::rope(&[2], 1, 1026, 5), // rows are longer than blocks
        cases::rope_by_halves(&[2], 1, 1026, 5), // rows are longer than blocks
        cases::split_heads([2, 7, 3, 5], 10),
        cases::merge_heads([2, 7, 3, 5], 11),
        cases::embedding(&[1], 5, 1, 9),
        cases::embedding(&[3, 123], 17, 33, 9),
        cases::embedding(&[257], 5, 1031, 9),
    ];
    for dims in [&[1][..], &[511], &[3, 1031]] {
        cases.extend(cases::activations(dims, 7));
        cases.push(cases::add_scaled(dims, dims, 0.3, 8));
    }
    cases.push(cases::repeated_heads(&[2, 3, 7, 5], 4, 12));
    cases.push(cases::repeated_heads(&[1, 2, 7, 123], 3, 13)); // rows are longer than blocks
    cases.push(cases::concat(&[3, 5, 7], 1, [5, 2, 4], 14));
    for (rows, width) in [(1, 1), (33, 65), (123, 257), (37, 1031), (2, 1536)] {
        cases.push(cases::rms_norm(&[rows], width, 3));
        cases.push(cases::layer_norm(&[rows], width, 4));
        for ignoring in [false, true] {
            cases.push(cases::cross_entropy(&[rows], width, 2.0, ignoring, 12));
        }
    }
    for mask in MASKS {
        for sizes in [(1, 1), (33, 41), (41, 33), (7, 1031), (123, 257)] {
            cases.push(cases::softmax(&[2], sizes, (0.5, 2.0), mask, 14));
        }
        cases.push(cases::softmax(&[2], (41, 33), (-0.5, 2.0), mask, 15));
    }
    cases
}

/// Returns the output's dtype: f32 for a loss, otherwise the input's.
fn out_dtype(case: &Case, dtype: DType) -> DType {
    match case.name.starts_with("cross_entropy") {
        true => DType::F32,
        false => dtype,
    }
}

#[rstest]
fn results_are_rounded_once(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
) {
    for case in cases() {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, REFERENCE);
        let half = case.run(dtype, policy);
        assert_eq!(half.out.dtype(), out_dtype(&case, dtype), "{}", case.name);
        assert_rounded_once(&case, &half, &exact);
    }
}

/// Losses with options, composed of several ops that read the logits.
#[rstest]
#[case(DType::F16)]
#[case(DType::BF16)]
fn losses_with_options_are_rounded_once(#[case] dtype: DType) {
    let all = cases::cross_entropy_options(17, 33, 3).into_iter();
    for case in all.filter(|case| !case.name.starts_with("linear")) {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, REFERENCE);
        assert_rounded_once(&case, &case.run(dtype, KERNEL), &exact);
    }
}

/// Sizes that kernels split into many tasks.
#[rstest]
#[case(DType::F16)]
#[case(DType::BF16)]
fn many_tasks_are_rounded_once(#[case] dtype: DType) {
    for case in every::large() {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, KERNEL);
        assert_rounded_once(&case, &case.run(dtype, KERNEL), &exact);
    }
}

fn products() -> Vec<Case> {
    let mut cases = vec![
        cases::linear(&[33], 65, 41, 6),
        cases::linear_bias(&[33], 65, 41, 6),
        cases::linear_bias(&[123], 257, 301, 9),
        cases::matmul(&[2], [33, 65, 41], 7),
        cases::matmul_transposed(&[2], [33, 65, 41], 8),
    ];
    for mask in MASKS {
        let how = (None, mask);
        let (heads, sizes) = ((8, 2), (33, 41));
        cases.push(cases::attention(&[1, 2], sizes, 24, how, 16));
        let grouped = cases::grouped_attention(&[1], heads, sizes, (24, 24), how, 17);
        cases.push(grouped);
        // Scores in the hundreds, where rounding a score changes probabilities visibly.
        let how = (Some(25.0), mask);
        cases.push(cases::attention(&[4, 4], (11, 32), 8, how, 18));
    }
    cases
}

#[rstest]
fn products_are_rounded_once(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
) {
    for case in products() {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, REFERENCE);
        let half = case.run(dtype, policy);
        assert_eq!(half.out.dtype(), dtype, "{}", case.name);
        assert_rounded_once(&case, &half, &exact);
    }
}

/// The first input is in `dtype`, the others in f32: the output is in `dtype`, each gradient in its input's.
#[rstest]
fn weights_and_tables_in_f32(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
) {
    for mut case in [
        cases::rms_norm(&[37], 1031, 3),
        cases::offset_rms_norm(&[37], 1031, 3),
        cases::layer_norm(&[33], 65, 4),
        cases::rope(&[2], 33, 24, 5),
        cases::rope_by_halves(&[2], 33, 24, 5),
    ] {
        case = case.rounded_to(DType::F32);
        let first = cast(&case.inputs[0].value, dtype);
        case.inputs[0].value = cast(&first, DType::F64);
        let exact = case.run(DType::F64, REFERENCE);

        let dtypes = |i: usize| if i == 0 { dtype } else { DType::F32 };
        let vars: Vec<Var> = (0..case.inputs.len())
            .map(|i| Var::from_tensor(&cast(&case.inputs[i].value, dtypes(i))).unwrap())
            .collect();
        let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let out = with_kernel_policy(policy, || (case.apply)(&inputs)).unwrap();
        assert_eq!(out.dtype(), dtype, "{}", case.name);
        let loss = (&out * case.upstream(&out)).unwrap().sum_all().unwrap();
        let mut found = loss.backward().unwrap();
        let mut gradients = Vec::new();
        for (i, (input, var)) in case.inputs.iter().zip(&vars).enumerate() {
            if input.differentiable {
                let gradient = found.remove(var).expect("a gradient");
                assert_eq!(gradient.dtype(), dtypes(i), "{}: {}", case.name, input.name);
                gradients.push((input.name, gradient));
            }
        }
        let out = out.detach();
        assert_rounded_once(&case, &Outcome { out, gradients }, &exact);
    }
}

/// 4096 ones in bf16: a sum in bf16 would stop at 256.
#[rstest]
fn sums_are_taken_in_f32(#[values(KERNEL, REFERENCE)] policy: KernelPolicy) {
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::BF16, &Device::Cpu).unwrap();
    let row = ones(&[1, 4096]);
    with_kernel_policy(policy, || {
        let p = ops::softmax(&row, 1.0, Mask::Full).unwrap();
        assert_eq!(elements(&p), [1.0 / 4096.0; 4096]);
        let norm = ops::rms_norm(&row, &ones(&[4096]), 0.0).unwrap();
        assert_eq!(elements(&norm), [1.0; 4096]);
        let target = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
        let loss = elements(&ops::cross_entropy(&row, &target).unwrap())[0];
        assert!((loss - 4096f64.ln()).abs() < 1e-5, "{loss}");

        // Also over rows, for the gradients of weights.
        let rows = ones(&[4096, 1]);
        let [weight, bias] = [1; 2].map(|width| Var::from_tensor(&ones(&[width])).unwrap());
        let gradient_of = |var: &Var, y: Tensor| {
            let gradients = (&y * &rows).unwrap().sum_all().unwrap().backward().unwrap();
            elements(gradients.get(var).unwrap())
        };
        let y = ops::rms_norm(&rows, &weight, 0.0).unwrap();
        assert_eq!(gradient_of(&weight, y), [4096.0]);
        let y = ops::layer_norm(&rows, &weight, &bias, 1.0).unwrap();
        assert_eq!(gradient_of(&bias, y), [4096.0]);
        let y = ops::linear_bias(&rows, &ones(&[1, 1]), &bias).unwrap();
        assert_eq!(gradient_of(&bias, y), [4096.0]);
        let head = Var::from_tensor(&ones(&[1, 1, 1])).unwrap();
        let y = ops::repeat_heads(&head, 4096).unwrap();
        assert_eq!(gradient_of(&head, y.reshape((4096, 1)).unwrap()), [4096.0]);
        let table = Var::from_tensor(&ones(&[3, 1])).unwrap();
        let ids = Tensor::ones(4096, DType::U32, &Device::Cpu).unwrap();
        let y = ops::embedding(&ids, &table).unwrap();
        assert_eq!(gradient_of(&table, y), [0.0, 4096.0, 0.0]);
    });
    let product = ops::linear(&row, &row).unwrap();
    assert_eq!(elements(&product), [4096.0]);
}

/// A bias in f32 is rounded when it is read; its gradient is not.
#[rstest]
fn a_bias_in_f32(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
) {
    let ones = |dims: &[usize], dtype| Tensor::ones(dims, dtype, &Device::Cpu).unwrap();
    let bias = Var::from_tensor(&Tensor::new(&[0.1f32], &Device::Cpu).unwrap()).unwrap();
    let y = with_kernel_policy(policy, || {
        ops::linear_bias(&ones(&[4097, 1], dtype), &ones(&[1, 1], dtype), &bias)
    });
    let y = y.unwrap();
    assert_eq!(y.dtype(), dtype);
    assert!(elements(&y).iter().all(|y| (y - 1.1).abs() < 0.01), "{y}");
    let gradients = y.sum_all().unwrap().backward().unwrap();
    let db = gradients.get(&bias).unwrap();
    // Neither half dtype represents 4097.
    assert_eq!((db.dtype(), elements(db)), (DType::F32, vec![4097.0]));
}

/// Squares of the largest f16 values overflow f16, but are computed in f32.
#[rstest]
fn large_f16_does_not_overflow_inside(#[values(KERNEL, REFERENCE)] policy: KernelPolicy) {
    let row: Vec<f64> = (0..66).map(|i| [6e4, -6e4][i % 2]).collect();
    let x = cast(&Tensor::new(&row[..], &Device::Cpu).unwrap(), DType::F16);
    let ones = x.ones_like().unwrap();
    let signs: Vec<f64> = row.iter().map(|x| x.signum()).collect();
    with_kernel_policy(policy, || {
        let y = ops::rms_norm(&x, &ones, 1e-5).unwrap();
        assert_eq!(elements(&y), signs);
        let y = ops::layer_norm(&x, &ones, &x.zeros_like().unwrap(), 1e-5).unwrap();
        assert_eq!(elements(&y), signs);
        let p = ops::softmax(&x, 1.0, Mask::Full).unwrap();
        let expected: Vec<f64> = signs.iter().map(|sign| (sign + 1.0) / 66.0).collect();
        let expected = cast(&Tensor::new(expected, &Device::Cpu).unwrap(), DType::F16);
        assert_eq!(elements(&p), elements(&expected));
    });
}
