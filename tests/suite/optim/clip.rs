//! Gradient norms and clipping.

use super::{elements, named, noise, noisy_gradient, relative, store, var};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use rstest::rstest;
use tallow::Error;
use tallow::optim::{clip_grad_norm, clip_grad_norm_checked, clip_grad_value, grad_norm};

#[test]
fn agrees_with_pytorch() {
    let a = var(&[0.0; 3], DType::F64);
    let b = Var::zeros((2, 2), DType::F64, &Device::Cpu).unwrap();
    let ga = Tensor::new(&[1f64, -2.0, 3.0], &Device::Cpu).unwrap();
    let gb = Tensor::new(&[[0.5f64, 0.25], [-4.0, 1.5]], &Device::Cpu).unwrap();
    let mut gradients = store(&[(&a, ga), (&b, gb)]);
    let norm = clip_grad_norm(&mut gradients, &named(&[&a, &b]), 1.0).unwrap();
    assert!((norm - 5.706356105256663).abs() < 1e-14);
    let expected = [
        0.17524315102516205,
        -0.3504863020503241,
        0.5257294530754861,
        0.08762157551258103,
        0.04381078775629051,
        -0.7009726041006482,
        0.26286472653774307,
    ];
    let mut got = elements(gradients.get(&a).unwrap());
    got.extend(elements(gradients.get(&b).unwrap()));
    assert!(relative(&got, &expected) < 1e-15);
}

#[rstest]
#[case(DType::F64, 1e-14)]
#[case(DType::F32, 1e-7)]
#[case(DType::BF16, 4e-3)]
#[case(DType::F16, 1e-3)]
fn scales_by_the_formula(#[case] dtype: DType, #[case] tolerance: f64) {
    let a = var(&noise(20_011, 1), dtype);
    let b = var(&noise(7, 2), dtype);
    let (ga, gb) = (noisy_gradient(&a, 3), noisy_gradient(&b, 4));
    let (before_a, before_b) = (elements(&ga), elements(&gb));
    let squares = before_a.iter().chain(&before_b).map(|g| g * g);
    let norm = squares.sum::<f64>().sqrt();
    for max_norm in [norm / 3.0, norm * 3.0] {
        let copies = [(&a, ga.copy().unwrap()), (&b, gb.copy().unwrap())];
        let mut gradients = store(&copies);
        let got = clip_grad_norm(&mut gradients, &named(&[&a, &b]), max_norm).unwrap();
        assert!((got / norm - 1.0).abs() < 1e-12, "{got} {norm}");
        let factor = (max_norm / (norm + 1e-6)).min(1.0);
        for (var, before) in [(&a, &before_a), (&b, &before_b)] {
            let expected: Vec<f64> = before.iter().map(|g| g * factor).collect();
            let after = gradients.get(var).unwrap();
            assert_eq!(after.dtype(), dtype);
            assert!(relative(&elements(after), &expected) < tolerance);
        }
        let after = grad_norm(&gradients, &named(&[&a, &b])).unwrap();
        assert!(after <= max_norm * (1.0 + tolerance), "{after} {max_norm}");
    }
}

fn is_in_place(before: &Tensor, gradients: &GradStore, var: &Var) -> bool {
    elements(before) == elements(gradients.get(var).unwrap())
}

#[test]
fn in_place_where_a_gradient_is_alone_and_only_there() {
    let (a, b, c) = (
        var(&[1.0; 2], DType::F32),
        var(&[1.0; 2], DType::F32),
        var(&[1.0; 2], DType::F32),
    );
    let d = Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    let shared = Tensor::new(&[3f32, 4.0], &Device::Cpu).unwrap();
    let alone = Tensor::new(&[6f32, 8.0], &Device::Cpu).unwrap();
    let strided = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)
        .unwrap()
        .t()
        .unwrap();
    let mut gradients = store(&[
        (&a, shared.clone()),
        (&b, shared.clone()),
        (&c, alone.clone()),
        (&d, strided.clone()),
    ]);
    let norm = clip_grad_norm(&mut gradients, &named(&[&a, &b, &c, &d]), 1.0).unwrap();
    assert!((norm - (25.0f64 + 25.0 + 100.0 + 30.0).sqrt()).abs() < 1e-9);
    let factor = 1.0 / (norm + 1e-6);
    let scaled = |x: &[f64]| x.iter().map(|x| x * factor).collect::<Vec<_>>();
    for var in [&a, &b] {
        let got = elements(gradients.get(var).unwrap());
        assert!(
            relative(&got, &scaled(&[3.0, 4.0])) < 1e-6,
            "scaled once: {got:?}"
        );
    }
    assert_eq!(elements(&shared), [3.0, 4.0]);
    assert!(is_in_place(&alone, &gradients, &c));
    let transposed = elements(gradients.get(&d).unwrap());
    assert!(relative(&transposed, &scaled(&[1.0, 3.0, 2.0, 4.0])) < 1e-6);
    assert_eq!(elements(&strided), [1.0, 3.0, 2.0, 4.0]);

    // A gradient that is the parameter itself.
    let mut gradients = store(&[(&a, a.detach())]);
    clip_grad_norm(&mut gradients, &named(&[&a]), 0.5).unwrap();
    assert_eq!(elements(&a), [1.0, 1.0]);
    assert!(!is_in_place(&a, &gradients, &a));
}

/// Checks clipping by value as in PyTorch: larger elements become the value, in the gradient's dtype, and NaN stays.
pub fn clips_by_value(device: &Device, dtype: DType) {
    let a = Var::zeros(20_011, dtype, device).unwrap();
    let before: Vec<f64> = noise(20_011, 3).iter().map(|x| 4.0 * x).collect();
    let gradient = |values: &[f64]| {
        let on_cpu = Tensor::new(values, &Device::Cpu).unwrap();
        on_cpu.to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let mut before = gradient(&before);
    let bad = gradient(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    before.slice_set(&bad, 0, 7).unwrap();
    let value = 0.3;
    let mut gradients = store(&[(&a, before.copy().unwrap())]);
    clip_grad_value(&mut gradients, &named(&[&a, &a]), value).unwrap();
    let after = gradients.get(&a).unwrap();
    assert_eq!(after.dtype(), dtype);
    let rounded = elements(&gradient(&[value]))[0];
    let mut clipped = 0;
    before = before.to_device(&Device::Cpu).unwrap();
    for (before, after) in elements(&before)
        .iter()
        .zip(elements(&after.to_device(&Device::Cpu).unwrap()))
    {
        let wanted = match *before {
            before if before > value => rounded,
            before if before < -value => -rounded,
            before => before,
        };
        clipped += usize::from(wanted != *before);
        assert!(
            after == wanted || after.is_nan() && wanted.is_nan(),
            "{before}: {after} for {wanted}"
        );
    }
    assert!(clipped > 1000, "{clipped}");
}

#[rstest]
fn by_value(#[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType) {
    clips_by_value(&Device::Cpu, dtype);
}

#[test]
fn by_value_in_place_and_what_is_refused() {
    let (a, b) = (var(&[2.0], DType::F32), var(&[1.0], DType::F32));
    let [alone, shared] = [6f32, -8.0].map(|x| Tensor::new(&[x], &Device::Cpu).unwrap());
    let mut gradients = store(&[(&a, alone.clone()), (&b, shared.clone())]);
    clip_grad_value(&mut gradients, &named(&[&a]), 5.0).unwrap();
    assert!(is_in_place(&alone, &gradients, &a) && elements(&alone) == [5.0]);
    let mut gradients = store(&[(&a, shared.clone()), (&b, shared.clone())]);
    clip_grad_value(&mut gradients, &named(&[&a]), 5.0).unwrap();
    assert_eq!(elements(gradients.get(&a).unwrap()), [-5.0]);
    assert_eq!(elements(gradients.get(&b).unwrap()), [-8.0]);
    for bad in [0.0, -1.0, f64::NAN] {
        refusal(
            clip_grad_value(&mut gradients, &named(&[&a]), bad),
            &["max_value must be over 0"],
        );
    }
    clip_grad_value(&mut gradients, &named(&[&a]), f64::INFINITY).unwrap();
    assert_eq!(elements(gradients.get(&a).unwrap()), [-5.0]);
    let mut gradients = store(&[(&a, alone)]);
    let error = clip_grad_value(&mut gradients, &named(&[&a, &b]), 1.0).unwrap_err();
    assert!(
        matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "b"),
        "{error}"
    );
    assert_eq!(elements(gradients.get(&a).unwrap()), [5.0]);
}

#[test]
fn a_tied_weight_counts_once() {
    let weight = var(&[3.0, 4.0], DType::F32);
    let mut gradients = store(&[(&weight, Tensor::new(&[3f32, 4.0], &Device::Cpu).unwrap())]);
    let twice = named(&[&weight, &weight]);
    assert_eq!(grad_norm(&gradients, &twice).unwrap(), 5.0);
    assert_eq!(clip_grad_norm(&mut gradients, &twice, 2.5).unwrap(), 5.0);
    assert!(relative(&elements(gradients.get(&weight).unwrap()), &[1.5, 2.0]) < 1e-6);
}

#[rstest]
#[case(f32::NAN)]
#[case(f32::INFINITY)]
fn a_norm_that_is_not_finite_leaves_gradients_alone(#[case] bad: f32) {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0; 2], DType::F32));
    let fine = Tensor::new(&[2f32], &Device::Cpu).unwrap();
    let broken = Tensor::new(&[bad, 1.0], &Device::Cpu).unwrap();
    let mut gradients = store(&[(&a, fine), (&b, broken)]);
    let norm = clip_grad_norm(&mut gradients, &named(&[&a, &b]), 1.0).unwrap();
    assert!(!norm.is_finite());
    assert_eq!(elements(gradients.get(&a).unwrap()), [2.0]);
    assert_eq!(elements(gradients.get(&b).unwrap())[1], 1.0);
    let error = refusal(
        clip_grad_norm_checked(&mut gradients, &named(&[&a, &b]), 1.0),
        &["parameter b"],
    );
    assert!(matches!(error, Error::Data { .. }), "{error}");
}

#[test]
fn missing_gradients_and_bad_limits_are_refused() {
    let (a, b) = (var(&[2.0], DType::F32), var(&[1.0], DType::F32));
    let mut gradients = a.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let error = clip_grad_norm(&mut gradients, &named(&[&a, &b]), 0.1).unwrap_err();
    assert!(
        matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "b"),
        "{error}"
    );
    assert_eq!(elements(gradients.get(&a).unwrap()), [4.0]);
    let error = grad_norm(&gradients, &named(&[&a, &b])).unwrap_err();
    assert!(matches!(error, Error::MissingGradient { .. }), "{error}");
    for bad in [0.0, -1.0, f64::NAN] {
        let error = clip_grad_norm(&mut gradients, &named(&[&a]), bad).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Config {
                    field: "max_norm",
                    ..
                }
            ),
            "{error}"
        );
    }
    assert_eq!(
        clip_grad_norm_checked(&mut gradients, &named(&[&a]), 8.0).unwrap(),
        4.0
    );
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    let weight = var(&noise(100_003, 1), DType::F32);
    let gradients = store(&[(&weight, noisy_gradient(&weight, 2))]);
    let with_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| grad_norm(&gradients, &named(&[&weight])).unwrap().to_bits())
    };
    assert_eq!(with_threads(1), with_threads(2));
    assert_eq!(with_threads(1), with_threads(3));
}
