//! The check against numbers that are not finite.

use super::{elements, named, store, var};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::Error;
use tallow::optim::check_finite;

fn scalar(value: f64) -> Tensor {
    Tensor::new(value, &Device::Cpu).unwrap()
}

#[rstest]
#[case(DType::F32, f64::NAN)]
#[case(DType::F64, f64::INFINITY)]
#[case(DType::F16, f64::NEG_INFINITY)]
#[case(DType::BF16, f64::NAN)]
fn names_the_parameter_and_changes_nothing(#[case] dtype: DType, #[case] bad: f64) {
    let (a, b) = (var(&[1.0; 3], dtype), var(&[1.0; 2], dtype));
    let gradient = |numbers: &[f64]| {
        let tensor = Tensor::new(numbers, &Device::Cpu).unwrap();
        tensor.to_dtype(dtype).unwrap()
    };
    let fine = gradient(&[1.0, -2.0, 0.0]);
    let gradients = store(&[(&a, fine.clone()), (&b, gradient(&[3.0, 4.0]))]);
    let loss = scalar(2.5);
    assert_eq!(
        check_finite(&loss, &gradients, &named(&[&a, &b])).unwrap(),
        2.5
    );
    let gradients = store(&[(&a, fine), (&b, gradient(&[3.0, bad]))]);
    let error = refusal(
        check_finite(&loss, &gradients, &named(&[&a, &b])),
        &[
            "the gradient of parameter b",
            "finite numbers",
            "infinity or NaN",
            "learning rate",
        ],
    );
    assert!(matches!(error, Error::Data { .. }), "{error:?}");
    assert_eq!(elements(gradients.get(&a).unwrap()), [1.0, -2.0, 0.0]);
    assert_eq!(elements(gradients.get(&b).unwrap())[0], 3.0);
}

#[rstest]
#[case(f64::NAN, "NaN")]
#[case(f64::INFINITY, "inf")]
fn the_loss_comes_first(#[case] bad: f64, #[case] text: &str) {
    let a = var(&[1.0], DType::F32);
    let gradients = store(&[(&a, Tensor::new(&[f32::NAN], &Device::Cpu).unwrap())]);
    let error = check_finite(&scalar(bad), &gradients, &named(&[&a])).unwrap_err();
    assert!(matches!(error, Error::Data { .. }), "{error:?}");
    let wanted = format!("the loss: expected a finite number, got {text}; lower");
    assert!(error.to_string().starts_with(&wanted), "{error}");
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let gradients = store(&[(&a, Tensor::new(&[1f32], &Device::Cpu).unwrap())]);
    let error = refusal(
        check_finite(&scalar(1.0), &gradients, &named(&[&a, &b])),
        &["parameter b"],
    );
    assert!(matches!(error, Error::MissingGradient { .. }), "{error:?}");
    let error = check_finite(a.as_tensor(), &gradients, &named(&[&a])).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error:?}");
}
