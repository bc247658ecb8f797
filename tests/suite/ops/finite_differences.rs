//! Gradients in f64 against finite differences, element by element, by kernel and reference, for inputs of any strides.

use super::case::{Case, Input, KERNEL, LAYOUTS, REFERENCE, cast, elements, normal};
use super::cases::{self, MASKS};
use super::compare::assert_close;
use super::every;
use crate::settings::with_mask;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention;
use tallow::ops::{self, Gelu, KernelPolicy};

/// With this step a fourth-order difference has errors of about 1e-12, both from truncation and from rounding.
const STEP: f64 = 1e-3;

/// Returns sum(out * d_out).
fn objective(case: &Case, operands: &[Tensor], policy: KernelPolicy) -> f64 {
    let out = case.value(operands, policy);
    let d_out = elements(&case.upstream(&out));
    elements(&out).iter().zip(d_out).map(|(y, d)| y * d).sum()
}

/// Returns the derivative of the objective with respect to element `element` of input `input`.
fn slope(case: &Case, input: usize, element: usize, policy: KernelPolicy) -> f64 {
    let at = |steps: f64| {
        let mut operands = case.operands(DType::F64);
        let mut values = elements(&operands[input]);
        values[element] += steps * STEP;
        operands[input] = Tensor::from_vec(values, operands[input].dims(), &Device::Cpu).unwrap();
        objective(case, &operands, policy)
    };
    (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * STEP)
}

fn check(case: &Case, policy: KernelPolicy) {
    let runs = LAYOUTS.map(|layout| (layout, case.run_in_layout(DType::F64, policy, layout)));
    let mut gradient = 0;
    for (i, input) in case.inputs.iter().enumerate() {
        if !input.differentiable {
            continue;
        }
        let elements = 0..input.value.elem_count();
        let slopes: Vec<f64> = elements
            .map(|element| slope(case, i, element, policy))
            .collect();
        let slopes = Tensor::from_vec(slopes, input.value.dims(), &Device::Cpu).unwrap();
        for (layout, run) in &runs {
            let (name, found) = &run.gradients[gradient];
            let what = format!("{}: d_{name}, {layout:?}, {policy:?}", case.name);
            assert_close(&what, found, &slopes, 1e-9);
        }
        gradient += 1;
    }
    assert_eq!(gradient, runs[0].1.gradients.len());
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn every_op_on_any_strides(#[case] policy: KernelPolicy) {
    every::small().iter().for_each(|case| check(case, policy));
}

/// Ops without a kernel, or with one for equal shapes only.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn scaled_sums_and_copies(#[case] policy: KernelPolicy) {
    let mut cases = vec![
        cases::add_scaled(&[2, 3, 5], &[2, 3, 5], 0.7, 1),
        cases::add_scaled(&[2, 3, 5], &[5], -1.5, 2),
        cases::add_scaled(&[5], &[2, 3, 5], 0.25, 3),
        cases::contiguous(5, 3, 4),
        cases::repeated_heads(&[3, 4, 2], 1, 5),
    ];
    for dim in 0..3 {
        cases.push(cases::concat(&[2, 3, 4], dim, [2, 1, 3], 6));
    }
    cases.iter().for_each(|case| check(case, policy));
}

/// Reductions of some dimensions, selections, and functions without a reference of their own.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn reductions_and_functions(#[case] policy: KernelPolicy) {
    let mut cases = cases::maps(&[2, 3, 5], 5);
    cases.extend(cases::selections([2, 3, 5], 7));
    cases.extend(cases::cross_entropy_options(5, 7, 8));
    cases.extend(cases::losses(&[3, 5], 9));
    for over in [&[0][..], &[1], &[2], &[0, 1], &[2, 0]] {
        cases.extend(cases::reductions(&[2, 3, 5], over, 6));
    }
    cases.iter().for_each(|case| check(case, policy));
}

/// One tensor used twice, and one repeated with a stride of 0: gradients accumulate.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn a_tensor_used_twice(#[case] policy: KernelPolicy) {
    let one = |name: &str, dims: &[usize], apply: fn(&Tensor) -> tallow::Result<Tensor>| {
        let inputs = vec![Input::new("x", normal(dims, 7))];
        Case::new(name, inputs, move |x| apply(&x[0]))
    };
    check(&one("swiglu(x, x)", &[3, 5], |x| ops::swiglu(x, x)), policy);
    check(
        &one("x x^T", &[2, 3, 5], |x| ops::matmul_transposed(x, x)),
        policy,
    );
    check(&one("linear(x, x)", &[3, 3], |x| ops::linear(x, x)), policy);
    for mask in MASKS {
        let config = with_mask(mask);
        let of_shared = config.clone();
        let inputs = vec![Input::new("x", normal(&[2, 1, 3, 4], 8))];
        let itself = Case::new("self-attention", inputs, move |x| {
            attention::naive(&x[0], &x[0], &x[0], &config)
        });
        check(&itself, policy);
        let inputs = vec![
            Input::new("q", normal(&[1, 3, 4, 4], 9)),
            Input::new("kv", normal(&[1, 1, 5, 4], 10)),
        ];
        let shared = Case::new("heads that share keys", inputs, move |x| {
            let keys = x[1].broadcast_as((1, 3, 5, 4))?;
            attention::naive(&x[0], &keys, &keys, &of_shared)
        });
        check(&shared, policy);
    }
}

/// Random directions, with rows longer than a vector register and many rows.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn directions_through_odd_sizes(#[case] policy: KernelPolicy) {
    let mut every = vec![
        cases::relu(&[123, 33], 1),
        cases::swiglu(&[123, 33], 2),
        cases::geglu(Gelu::Erf, &[123, 33], 2),
        cases::geglu(Gelu::Tanh, &[123, 33], 2),
        cases::soft_cap(&[123, 33], 2.0, 2),
        cases::rms_norm(&[123], 65, 3),
        cases::offset_rms_norm(&[123], 65, 3),
        cases::layer_norm(&[123], 65, 4),
        cases::rope(&[3], 123, 24, 5),
        cases::rope_by_halves(&[3], 123, 24, 5),
        cases::linear(&[123], 33, 65, 6),
        cases::matmul(&[3], [65, 33, 17], 7),
        cases::matmul_transposed(&[3], [65, 33, 17], 8),
        cases::embedding(&[123], 31, 33, 9),
        cases::split_heads([3, 41, 5, 6], 10),
        cases::merge_heads([3, 41, 5, 6], 11),
        cases::cross_entropy(&[123], 65, 3.0, false, 12),
        cases::cross_entropy(&[123], 65, 3.0, true, 13),
        cases::linear_bias(&[123], 33, 65, 17),
        cases::repeated_heads(&[3, 5, 41, 6], 4, 18),
        cases::add_scaled(&[123, 33], &[123, 33], 0.3, 19),
        cases::concat(&[7, 123, 5], 1, [123, 1, 33], 20),
    ];
    every.extend(cases::activations(&[123, 33], 21));
    for over in [&[0][..], &[1], &[2], &[0, 2]] {
        let mut reductions = cases::reductions(&[7, 41, 33], over, 22);
        reductions.retain(|case| !case.name.contains("max_") && !case.name.contains("min_")); // not smooth
        every.extend(reductions);
    }
    for mask in MASKS {
        every.push(cases::softmax(&[2], (33, 65), (0.5, 3.0), mask, 14));
        every.push(cases::attention(&[2, 1], (65, 33), 24, (None, mask), 15));
        let how = (None, mask);
        every.push(cases::grouped_attention(
            &[2],
            (6, 2),
            (33, 65),
            (24, 17),
            how,
            16,
        ));
    }
    for case in &every {
        let run = case.run(DType::F64, policy);
        let operands = case.operands(DType::F64);
        let moves = |x: &Tensor| (normal(x.dims(), 0xd1) * 0.25).unwrap();
        let mut gradient = 0;
        for (i, input) in case.inputs.iter().enumerate() {
            if !input.differentiable {
                continue;
            }
            let direction = moves(&input.value);
            let at = |steps: f64| {
                let mut operands = operands.clone();
                let moved = (&direction * (steps * STEP)).unwrap();
                operands[i] = (&operands[i] + moved).unwrap();
                objective(case, &operands, policy)
            };
            let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * STEP);
            let (name, found) = &run.gradients[gradient];
            let terms: Vec<f64> = elements(found)
                .iter()
                .zip(elements(&cast(&direction, DType::F64)))
                .map(|(g, d)| g * d)
                .collect();
            let (sum, size) = (
                terms.iter().sum::<f64>(),
                terms.iter().map(|t| t.abs()).sum::<f64>(),
            );
            assert!(
                (slope - sum).abs() <= 1e-9 * size,
                "{}: d_{name}: {slope} by differences, {sum} by backward",
                case.name
            );
            gradient += 1;
        }
    }
}
