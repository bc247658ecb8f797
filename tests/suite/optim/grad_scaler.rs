//! The loss scaler: its rule, its effect on gradients, its errors, and training in f16 with it.

mod gradients;
mod refusals;
mod rule;
mod training;

use super::{elements, named, noise, store, var};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use tallow::optim::{AdamWConfig, GradScaler, GradScalerConfig, Optimizer};

fn scaler() -> GradScaler {
    GradScaler::new(GradScalerConfig::default()).unwrap()
}

fn adamw(vars: &[&Var]) -> Optimizer {
    Optimizer::new(named(vars), AdamWConfig::default()).unwrap()
}

/// Returns a store with one gradient of these values and dtype for `var`.
fn gradient(var: &Var, numbers: &[f64], dtype: DType) -> GradStore {
    store(&[(var, tensor(numbers, dtype))])
}

fn tensor(numbers: &[f64], dtype: DType) -> Tensor {
    let tensor = Tensor::new(numbers, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}
