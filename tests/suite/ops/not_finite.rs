//! NaN, infinities and huge numbers do not spread to other rows, and no finite input produces them.

use super::case::{Case, DTYPES, Input, KERNEL, Outcome, REFERENCE, bits, cast, elements};
use super::cases::{self, EPS, IGNORE};
use super::compare::epsilon;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::{self, Gelu, KernelPolicy};

/// Returns `tensor` with the elements at flat indices `places` replaced.
fn poisoned(tensor: &Tensor, places: impl IntoIterator<Item = usize>, value: f64) -> Tensor {
    let mut values = elements(tensor);
    places.into_iter().for_each(|place| values[place] = value);
    Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap()
}

fn of_rows(rows: &[f64], width: usize) -> Tensor {
    Tensor::from_vec(rows.to_vec(), (rows.len() / width, width), &Device::Cpu).unwrap()
}

/// Checks that with a NaN at element `place` of input `input`, the output rows in `hit` are NaN. Other rows keep their
/// bits, also in the first input's gradient.
fn stays_in(
    case: impl Fn() -> Case,
    input: usize,
    place: usize,
    hit: &[usize],
    policy: KernelPolicy,
) {
    for dtype in DTYPES {
        let (clean, mut sick) = (case(), case());
        sick.inputs[input].value = poisoned(&sick.inputs[input].value, [place], f64::NAN);
        let (healthy, ill) = (clean.run(dtype, policy), sick.run(dtype, policy));
        let rows = |tensor: &Tensor| -> Vec<Vec<u64>> {
            let width = tensor.dims().last().copied().unwrap_or(1);
            bits(tensor).chunks(width).map(<[u64]>::to_vec).collect()
        };
        let is_nan = |row: &[u64]| row.iter().all(|bits| f64::from_bits(*bits).is_nan());
        let (before, after) = (rows(&healthy.out), rows(&ill.out));
        for (row, (before, after)) in before.iter().zip(&after).enumerate() {
            if hit.contains(&row) {
                assert!(is_nan(after), "{}: row {row} hides the NaN", clean.name);
            } else {
                assert_eq!(before, after, "{}: row {row}", clean.name);
            }
        }
        if input == 0 {
            let (before, after) = (rows(&healthy.gradients[0].1), rows(&ill.gradients[0].1));
            for (row, (before, after)) in before.iter().zip(&after).enumerate() {
                assert!(
                    hit.contains(&row) || before == after,
                    "{}: gradient of row {row}",
                    clean.name
                );
            }
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn nan_stays_in_its_row(#[case] policy: KernelPolicy) {
    let width = 37; // more than a chunk of 32 lanes, so that the NaN is neither the first nor the last of its lane
    for column in [0, 5, 36] {
        let place = 2 * width + column;
        stays_in(|| cases::rms_norm(&[4], width, 1), 0, place, &[2], policy);
        stays_in(|| cases::layer_norm(&[4], width, 1), 0, place, &[2], policy);
        let softmax = || cases::softmax(&[], (4, width), (0.5, 2.0), Mask::Full, 1);
        stays_in(softmax, 0, place, &[2], policy);
        stays_in(|| cases::linear(&[4], width, 5, 1), 0, place, &[2], policy);
        stays_in(
            || cases::matmul(&[2], [2, width, 5], 1),
            0,
            place,
            &[2],
            policy,
        );
        stays_in(
            || cases::embedding(&[6], 4, width, 1),
            0,
            3 * width,
            &[],
            policy,
        );
    }
    stays_in(
        || cases::linear_bias(&[4], width, 5, 1),
        0,
        2 * width + 5,
        &[2],
        policy,
    );
    for (i, (name, _)) in cases::ACTIVATIONS.iter().enumerate() {
        let case = || cases::activations(&[9, 1], 1).remove(i);
        assert_eq!(case().name, *name);
        stays_in(case, 0, 4, &[4], policy);
    }
    // One element per row.
    stays_in(|| cases::relu(&[9, 1], 1), 0, 4, &[4], policy);
    for input in [0, 1] {
        stays_in(|| cases::swiglu(&[9, 1], 1), input, 4, &[4], policy);
    }
}

/// Masked scores have no effect, whatever their value.
#[rstest]
fn masked_scores_have_no_effect(
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
    #[values(Mask::Causal, Mask::CausalEnd)] mask: Mask,
    #[values(f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30)] value: f64,
) {
    for (queries, keys) in [(5, 9), (9, 5), (7, 7)] {
        let make = || cases::softmax(&[], (queries, keys), (0.5, 2.0), mask, 1);
        let (clean, mut sick) = (make(), make());
        let hidden = (0..queries * keys).filter(|place| match mask {
            Mask::Causal => place % keys > place / keys,
            _ => place % keys + queries > place / keys + keys,
        });
        sick.inputs[0].value = poisoned(&sick.inputs[0].value, hidden, value);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let (clean, sick) = (clean.run(dtype, policy), sick.run(dtype, policy));
            assert_eq!(bits(&clean.out), bits(&sick.out), "{queries}x{keys}");
            assert_eq!(
                elements(&clean.gradients[0].1),
                elements(&sick.gradients[0].1),
                "{queries}x{keys}"
            );
        }
    }
}

/// A score of -inf has probability 0; huge scores neither overflow nor vanish.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn softmax_of_infinite_and_huge_scores(#[case] policy: KernelPolicy) {
    let low = f64::NEG_INFINITY;
    let x = of_rows(&[0.0, low, 0.0, 1e30, 1e30, -1e30, -1e30, low, -1e30], 3);
    let case = Case::new("softmax", vec![Input::new("x", x)], |x| {
        ops::softmax(&x[0], 1.0, Mask::Full)
    });
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let Outcome { out, gradients } = case.run(dtype, policy);
        assert_eq!(
            elements(&out),
            [0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.5, 0.0, 0.5]
        );
        let dx = elements(&gradients[0].1);
        assert!(dx.iter().all(|dx| dx.is_finite()), "{dx:?}");
        assert!(dx[0] != 0.0 && dx[1] == 0.0 && dx[5] == 0.0, "{dx:?}");
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn cross_entropy_of_infinite_and_huge_logits(#[case] policy: KernelPolicy) {
    let low = f64::NEG_INFINITY;
    let rows = [
        1e30, -1e30, 0.0, 0.0, low, 0.0, 1e4, 1e4, -1e4, -1e30, -1e30, -1e30,
    ];
    let targets = Tensor::new(&[0u32, 2, 1, 2], &Device::Cpu).unwrap();
    let inputs = vec![Input::new("logits", of_rows(&rows, 3))];
    let mut case = Case::new("cross_entropy", inputs, move |x| {
        ops::cross_entropy(&x[0], &targets)
    });
    case.d_out = Some(Tensor::new(4f64, &Device::Cpu).unwrap()); // cancels the mean's division
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let Outcome { out, gradients } = case.run(dtype, policy);
        let loss = elements(&out)[0];
        // The terms ln 2 next to 1e4 and ln 3 next to 1e30 are exact.
        let expected = (2.0 * 2f64.ln() + 3f64.ln()) / 4.0;
        assert!((loss - expected).abs() <= 1e-6, "{loss}, not {expected}");
        let dx = elements(&gradients[0].1);
        assert!(dx.iter().all(|dx| dx.is_finite()), "{dx:?}");
        assert_eq!(dx[..6], [0.0, 0.0, 0.0, 0.5, 0.0, -0.5], "{dx:?}");
    }
}

/// A NaN makes the loss and its own row's gradient NaN, unless the row's target is ignored.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn cross_entropy_of_nan(#[case] policy: KernelPolicy) {
    let run = |targets: [u32; 3], value: f64, dtype: DType| {
        let logits = cases::cross_entropy(&[3], 37, 2.0, false, 5)
            .inputs
            .remove(0);
        let logits = poisoned(&logits.value, [37 + 5], value);
        let targets = Tensor::new(&targets, &Device::Cpu).unwrap();
        let case = Case::new(
            "cross_entropy",
            vec![Input::new("logits", logits)],
            move |x| ops::cross_entropy_ignoring(&x[0], &targets, IGNORE.into()),
        );
        let Outcome { out, gradients } = case.run(dtype, policy);
        (elements(&out)[0], elements(&gradients[0].1))
    };
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for bad in [f64::NAN, f64::INFINITY] {
            let (loss, dx) = run([1, 2, 3], bad, dtype);
            assert!(loss.is_nan());
            let sick: Vec<bool> = dx
                .chunks(37)
                .map(|row| row.iter().any(|dx| dx.is_nan()))
                .collect();
            assert_eq!(sick, [false, true, false]);
            let (loss, dx) = run([1, IGNORE, 3], bad, dtype);
            let (clean_loss, clean) = run([1, IGNORE, 3], 0.0, dtype);
            assert_eq!(loss, clean_loss);
            assert_eq!(dx, clean);
            assert!(dx[37..74].iter().all(|dx| *dx == 0.0) && dx[..37].iter().all(|dx| *dx != 0.0));
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn relu_and_gates_at_the_ends(#[case] policy: KernelPolicy) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let x = Tensor::new(&[inf, -inf, nan, 0.0, -0.0, 2.0], &Device::Cpu).unwrap();
    let mut relu = Case::new("relu", vec![Input::new("x", x)], |x| ops::relu(&x[0]));
    relu.d_out = Some(Tensor::new(&[3f64; 6], &Device::Cpu).unwrap());
    let gate = [1e4, -1e4, 100.0, -100.0, 0.0];
    let inputs = vec![
        Input::new("gate", Tensor::new(&gate, &Device::Cpu).unwrap()),
        Input::new("up", Tensor::new(&[2f64; 5], &Device::Cpu).unwrap()),
    ];
    type Gate = fn(&[Tensor]) -> tallow::Result<Tensor>;
    let gates: [Gate; 3] = [
        |x| ops::swiglu(&x[0], &x[1]),
        |x| ops::geglu(&x[0], &x[1], Gelu::Erf),
        |x| ops::geglu(&x[0], &x[1], Gelu::Tanh),
    ];
    let gates = gates.map(|gate| Case {
        d_out: Some(Tensor::new(&[3f64; 5], &Device::Cpu).unwrap()),
        ..Case::new("gate", inputs.clone(), gate)
    });
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let run = relu.run(dtype, policy);
        let (y, dx) = (elements(&run.out), elements(&run.gradients[0].1));
        assert!(y[2].is_nan());
        assert_eq!([y[0], y[1], y[3], y[4], y[5]], [inf, 0.0, 0.0, 0.0, 2.0]);
        assert_eq!(
            [dx[0], dx[1], dx[3], dx[4], dx[5]],
            [3.0, 0.0, 0.0, 0.0, 3.0]
        );

        let tolerance = epsilon(dtype).max(1e-5);
        let close = |found: &Tensor, expected: [f64; 5]| {
            for (found, expected) in elements(found).into_iter().zip(expected) {
                assert!(
                    (found - expected).abs() <= tolerance * expected.abs() + 1e-30,
                    "{found}, not {expected}"
                );
            }
        };
        for gate in &gates {
            let run = gate.run(dtype, policy);
            close(&run.out, [2e4, 0.0, 200.0, 0.0, 0.0]);
            close(&run.gradients[0].1, [6.0, 0.0, 6.0, 0.0, 3.0]);
            close(&run.gradients[1].1, [3e4, 0.0, 300.0, 0.0, 0.0]);
        }
    }
}

/// For large |x| silu is 0 or x, and its slope 0 or 1, without overflow.
#[rstest]
fn swiglu_of_large_gates(
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
    #[values(DType::F32, DType::F64, DType::BF16)] dtype: DType,
) {
    let gates = [
        -1e30, -3e6, -745.5, -500.5, -88.5, -20.25, -3.5, 0.0, 0.5, 20.25, 88.5, 500.5, 1234.5,
        3e6, 1e30,
    ];
    let gate = Tensor::new(&gates, &Device::Cpu).unwrap();
    let up = gate.ones_like().unwrap();
    let inputs = vec![Input::new("gate", gate), Input::new("up", up)];
    let mut case = Case::new("swiglu", inputs, |x| ops::swiglu(&x[0], &x[1])).rounded_to(dtype);
    case.d_out = Some(Tensor::new(&[1f64; 15], &Device::Cpu).unwrap());
    let gates = elements(&case.inputs[0].value);
    let run = case.run(dtype, policy);
    // 1 - s has an error of half an ulp of 1, multiplied by a gate of at most 40; beyond that it is 0.
    let limit = |gate: f64| match dtype {
        DType::BF16 => epsilon(dtype),
        _ => (8.0 + 0.5 * gate.abs().min(40.0)) * epsilon(dtype),
    };
    let close = |what: &str, found: &Tensor, exact: &dyn Fn(f64, [f64; 2]) -> f64| {
        for (found, gate) in elements(found).into_iter().zip(&gates) {
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let exact = exact(*gate, [sigmoid(*gate), sigmoid(-gate)]);
            assert!(
                (found - exact).abs() <= limit(*gate) * exact.abs() + 1e-35,
                "{what} of {gate}: {found}, not {exact}"
            );
        }
    };
    close("y", &run.out, &|gate, [s, _]| gate * s);
    close("dgate", &run.gradients[0].1, &|gate, [s, rest]| {
        s + gate * s * rest
    });
    close("dup", &run.gradients[1].1, &|gate, [s, _]| gate * s);
}

/// For large |x| every activation and its slope reach their limits without overflow.
#[rstest]
fn activations_of_large_inputs(
    #[values(KERNEL, REFERENCE)] policy: KernelPolicy,
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    let largest = if dtype == DType::F16 { 6e4 } else { 1e15 };
    let x = [-largest, -1e3, -100.0, 0.0, 100.0, 1e3, largest];
    for (mut case, bends) in cases::activations(&[7], 1)
        .into_iter()
        .zip([false, false, false, true, true, true])
    {
        case.inputs[0].value = Tensor::new(&x, &Device::Cpu).unwrap();
        case.d_out = Some(Tensor::new(&[1f64; 7], &Device::Cpu).unwrap());
        let case = case.rounded_to(dtype);
        let x = elements(&case.inputs[0].value);
        let run = case.run(dtype, policy);
        let (y, dx) = (elements(&run.out), elements(&run.gradients[0].1));
        let lowest = if case.name == "tanh" { -1.0 } else { 0.0 };
        let middle = if case.name == "sigmoid" { 0.5 } else { 0.0 };
        let slope = match case.name.as_str() {
            "tanh" => 1.0,
            "sigmoid" => 0.25,
            _ => 0.5,
        };
        let ends = |i: usize| if bends { [x[i], 1.0] } else { [1.0, 0.0] };
        for i in 0..7 {
            let wanted = match i {
                _ if case.name == "log_sigmoid" => match i {
                    0..3 => [x[i], 1.0],
                    3 => [-std::f64::consts::LN_2, 0.5],
                    _ => [0.0, 0.0],
                },
                0..3 => [lowest, 0.0],
                3 => [middle, slope],
                _ => ends(i),
            };
            let close = |a: f64, b: f64| (a - b).abs() <= epsilon(dtype) * b.abs() + 1e-30;
            let what = format!(
                "{} of {}: {} and {}, not {wanted:?}",
                case.name, x[i], y[i], dx[i]
            );
            assert!(close(y[i], wanted[0]) && close(dx[i], wanted[1]), "{what}");
        }
    }
}

/// With rows of zeros, eps keeps the norms finite.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn norms_of_zeros(#[case] policy: KernelPolicy) {
    for mut case in [cases::rms_norm(&[2], 7, 1), cases::layer_norm(&[2], 7, 1)] {
        case.inputs[0].value = poisoned(&case.inputs[0].value, 0..7, 0.0);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let run = case.run(dtype, policy);
            let (y, dx) = (elements(&run.out), elements(&run.gradients[0].1));
            let bias = case
                .inputs
                .get(2)
                .map_or(vec![0.0; 7], |bias| elements(&cast(&bias.value, dtype)));
            assert_eq!(y[..7], bias[..]);
            // The slope there is about 1 / sqrt(eps).
            let largest = dx[..7].iter().fold(0f64, |a, b| a.max(b.abs()));
            assert!(
                largest > 0.1 / EPS.sqrt() && largest < 10.0 / EPS.sqrt(),
                "{largest}"
            );
        }
    }
}
