//! Numbers of tensors, and checks of them and of errors, that tests of several modules share.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use std::fmt::Display;

/// The elements, widened to f64.
pub fn elements(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_dtype(DType::F64).and_then(|t| t.flatten_all());
    flat.unwrap().to_vec1().unwrap()
}

/// The bits of the elements. Widening to f64 keeps every bit of a smaller float.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    elements(tensor).into_iter().map(f64::to_bits).collect()
}

/// |got - wanted| / |wanted| over the whole tensor.
pub fn distance(got: &Tensor, wanted: &Tensor) -> f64 {
    let [difference, size] = norms(got, wanted);
    difference / size
}

/// The norms of `got - wanted` and of `wanted`.
pub fn norms(got: &Tensor, wanted: &Tensor) -> [f64; 2] {
    assert_eq!(got.dims(), wanted.dims());
    let (got, wanted) = (elements(got), elements(wanted));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(&wanted).map(|(g, w)| g - w));
    [difference, norm(&mut wanted.iter().copied())]
}

/// The gradient of each parameter. One without a gradient, or of another shape, fails.
pub fn gradients_of(
    parameters: Vec<(String, Var)>,
    gradients: &GradStore,
) -> Vec<(String, Tensor)> {
    let gradient = |(name, var): (String, Var)| match gradients.get(&var) {
        Some(gradient) => {
            assert_eq!(gradient.dims(), var.dims(), "{name}");
            (name, gradient.clone())
        }
        None => panic!("{name} has no gradient"),
    };
    parameters.into_iter().map(gradient).collect()
}

/// The error, whose text must contain all of `parts`.
#[track_caller]
pub fn refusal<T, E: Display>(result: Result<T, E>, parts: &[&str]) -> E {
    let error = result.err().expect("this must be refused");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    error
}
