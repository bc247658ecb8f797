//! `tallow::precision`, and ops in autocast regions.

mod arithmetic;
mod autocast_model;
mod cache;
mod casts;
mod own_ops;
mod pytorch;
mod regions;
mod values;

use crate::check::{bits, elements};
use candle_core::{DType, Device, Tensor, Var};
use tallow::precision::Autocast;

/// Returns numbers between 0.5 and 1.5 without a pattern, which differ with `salt`.
fn numbers(shape: &[usize], dtype: DType, salt: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let draw =
        |i: usize| (((i + 1) * 7919 + salt * 104_729) as f64 * 0.618_033_988_75).fract() + 0.5;
    let values: Vec<f64> = (0..n).map(draw).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn var(shape: &[usize], dtype: DType, salt: usize) -> Var {
    Var::from_tensor(&numbers(shape, dtype, salt)).unwrap()
}

/// Checks for equal dtypes, shapes and bits.
#[track_caller]
fn same(got: &Tensor, wanted: &Tensor) {
    assert_eq!((got.dtype(), got.dims()), (wanted.dtype(), wanted.dims()));
    assert_eq!(bits(got), bits(wanted));
}

/// Returns both policies with both dtypes.
fn policies() -> Vec<(&'static str, DType, Autocast)> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        all.push(("cuda", dtype, Autocast::cuda(dtype)));
        all.push(("cpu", dtype, Autocast::cpu(dtype)));
    }
    all
}
