//! Elements of tensors, and checks of tensors and errors, shared by tests of several modules.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use std::fmt::Display;

/// Returns the elements, converted to f64.
pub fn elements(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_dtype(DType::F64).and_then(|t| t.flatten_all());
    flat.unwrap().to_vec1().unwrap()
}

/// Returns the bits of the elements in f64, which represents every smaller float exactly.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    elements(tensor).into_iter().map(f64::to_bits).collect()
}

/// Returns |got - wanted| / |wanted| by norm.
pub fn distance(got: &Tensor, wanted: &Tensor) -> f64 {
    let [difference, size] = norms(got, wanted);
    difference / size
}

/// Returns the norms of `got - wanted` and of `wanted`.
pub fn norms(got: &Tensor, wanted: &Tensor) -> [f64; 2] {
    assert_eq!(got.dims(), wanted.dims());
    let (got, wanted) = (elements(got), elements(wanted));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(&wanted).map(|(g, w)| g - w));
    [difference, norm(&mut wanted.iter().copied())]
}

/// Returns the gradient of each parameter; fails if one is missing or has another shape.
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

/// Returns the error, whose text must contain all of `parts`.
#[track_caller]
pub fn refusal<T, E: Display>(result: Result<T, E>, parts: &[&str]) -> E {
    let error = result.err().expect("this must be refused");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    error
}
