//! Our optimizer used through candle's `Optimizer` trait.

use super::{elements, noise, relative, var};
use crate::check::refusal;
use candle_core::{DType, Device, Var};
use candle_nn::Optimizer as _;
use tallow::optim::{AdamWConfig, Optimizer, Rule};

/// A training loop that uses the trait only.
fn train<O: candle_nn::Optimizer>(
    var: &Var,
    config: O::Config,
    lr: f64,
) -> candle_core::Result<Vec<f64>> {
    let mut optimizer = O::new(vec![var.clone()], config)?;
    optimizer.set_learning_rate(lr);
    assert_eq!(optimizer.learning_rate(), lr);
    for _ in 0..20 {
        optimizer.backward_step(&var.sqr()?.sum_all()?)?;
    }
    Ok(elements(var))
}

#[test]
fn the_same_as_candles_own() {
    let start = noise(33, 1);
    let ours = train::<Optimizer>(&var(&start, DType::F64), Rule::default(), 0.01).unwrap();
    let config = candle_nn::ParamsAdamW::default();
    let theirs = train::<candle_nn::AdamW>(&var(&start, DType::F64), config, 0.01).unwrap();
    let error = relative(&ours, &theirs);
    assert!(error < 1e-13, "{error}");
    assert!(relative(&ours, &start) > 1e-2);
}

#[test]
fn a_missing_gradient_is_named_by_position_and_shape() {
    let used = var(&[1.0], DType::F32);
    let unused = Var::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let counter = Var::zeros(1, DType::U32, &Device::Cpu).unwrap();
    let vars = vec![used.clone(), counter, unused];
    let mut optimizer =
        <Optimizer as candle_nn::Optimizer>::new(vars, AdamWConfig::default().into()).unwrap();
    let loss = used.sqr().unwrap().sum_all().unwrap();
    refusal(
        optimizer.backward_step(&loss),
        &["#2 [2, 3]", "no gradient"],
    );
    assert_eq!(elements(&used), [1.0]);
}

#[test]
fn nothing_to_optimize_is_fine_through_the_trait() {
    let mut optimizer = <Optimizer as candle_nn::Optimizer>::empty(Rule::default()).unwrap();
    let loss = var(&[1.0], DType::F32).sqr().unwrap().sum_all().unwrap();
    optimizer.backward_step(&loss).unwrap();
    assert_eq!((optimizer.steps(), optimizer.state().len()), (1, 0));
}
