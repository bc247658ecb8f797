//! The optimizer, clipping, accumulation and schedules. Expected numbers come from recurrences in these files, and from
//! PyTorch 2.15 where a test says so.

mod accumulate;
mod adamw;
mod candle_trait;
mod clip;
#[cfg(feature = "cuda")]
mod gpu;
mod grad_scaler;
mod groups;
mod guard;
mod kernel;
mod missing;
mod muon;
mod rules;
mod schedule;
mod state;

use crate::check::elements;
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};

/// Returns a variable on the CPU with these numbers.
fn var(values: &[f64], dtype: DType) -> Var {
    let tensor = Tensor::new(values, &Device::Cpu).unwrap();
    Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap()
}

/// Returns numbers without a pattern, the same for the same seed.
fn noise(n: usize, seed: usize) -> Vec<f64> {
    (0..n)
        .map(|i| ((i * 7919 + seed * 104_729 + 13) as f64 * 0.618_033_988_75).sin() * 1.7)
        .collect()
}

/// Returns a store with these gradients only.
fn store(gradients: &[(&Var, Tensor)]) -> GradStore {
    let constant = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
    let mut store = constant.backward().unwrap();
    store.remove(&constant);
    for (var, gradient) in gradients {
        store.insert(var, gradient.clone());
    }
    store
}

/// Returns a random gradient with the shape and dtype of `var`.
fn noisy_gradient(var: &Var, seed: usize) -> Tensor {
    let values = noise(var.elem_count(), seed);
    let tensor = Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap();
    tensor.to_dtype(var.dtype()).unwrap()
}

fn named(vars: &[&Var]) -> Vec<(String, Var)> {
    let names = ('a'..='z').map(String::from);
    names.zip(vars.iter().map(|var| (*var).clone())).collect()
}

/// Returns |a - b| / |b| by norm.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-300)
}
