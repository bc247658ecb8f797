//! Activation checkpointing: bit-exact gradients, arbitrary functions, and errors.

mod functions;
pub mod model;
mod names;
mod refusals;

use crate::check::bits;
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};

const CPU: Device = Device::Cpu;

/// Returns numbers in [-1, 1) that differ with `salt`.
fn numbers(shape: &[usize], salt: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let values = (0..n).map(|i| ((i * 31 + salt * 17 + 1) as f32 * 0.618_034).fract() * 2.0 - 1.0);
    Tensor::from_vec(values.collect::<Vec<_>>(), shape, &CPU).unwrap()
}

fn var(shape: &[usize], salt: usize) -> Var {
    Var::from_tensor(&numbers(shape, salt)).unwrap()
}

/// Returns the bits of the gradients of all `vars`, which must exist.
fn gradient_bits(gradients: &GradStore, vars: &[&Var]) -> Vec<Vec<u64>> {
    let of = |var: &&Var| bits(gradients.get(var).expect("a gradient"));
    vars.iter().map(of).collect()
}
