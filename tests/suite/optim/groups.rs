//! Parameter groups.

use super::{elements, named, noise, noisy_gradient, store, var};
use crate::check::refusal;
use crate::settings::with_lr;
use candle_core::{DType, Device, Tensor, Var};
use tallow::Error;
use tallow::optim::{AdamWConfig, Optimizer, ParameterGroup, decay_matrices_only};

fn group(vars: &[(&str, &Var)], config: AdamWConfig) -> ParameterGroup {
    ParameterGroup {
        parameters: vars
            .iter()
            .map(|(name, var)| (name.to_string(), (*var).clone()))
            .collect(),
        rule: config.into(),
    }
}

#[test]
fn each_group_has_its_own_hyperparameters() {
    let slow = AdamWConfig {
        lr: 1e-4,
        weight_decay: 0.0,
        ..Default::default()
    };
    let fast = AdamWConfig {
        lr: 1e-2,
        betas: (0.8, 0.9),
        ..Default::default()
    };
    let (a, b) = (var(&noise(7, 1), DType::F64), var(&noise(9, 2), DType::F64));
    let (a_alone, b_alone) = (var(&noise(7, 1), DType::F64), var(&noise(9, 2), DType::F64));
    let mut both = Optimizer::with_groups(vec![
        group(&[("a", &a)], slow),
        group(&[], fast),
        group(&[("b", &b)], fast),
    ])
    .unwrap();
    let mut first = Optimizer::new(named(&[&a_alone]), slow).unwrap();
    let mut second = Optimizer::new(named(&[&b_alone]), fast).unwrap();
    for t in 0..5 {
        let (ga, gb) = (noisy_gradient(&a, t), noisy_gradient(&b, t + 50));
        both.step(&store(&[(&a, ga.clone()), (&b, gb.clone())]))
            .unwrap();
        first.step(&store(&[(&a_alone, ga)])).unwrap();
        second.step(&store(&[(&b_alone, gb)])).unwrap();
    }
    assert_eq!(elements(&a), elements(&a_alone));
    assert_eq!(elements(&b), elements(&b_alone));
}

#[test]
fn learning_rates_are_set_for_all_groups_or_one() {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let config = with_lr(0.5);
    let mut optimizer = Optimizer::with_groups(vec![
        group(&[("a", &a)], config),
        group(&[("b", &b)], config),
    ])
    .unwrap();
    assert_eq!(optimizer.learning_rate(), 0.5);
    optimizer.set_learning_rate_of(1, 0.25).unwrap();
    let rates = |optimizer: &Optimizer| {
        optimizer
            .groups()
            .iter()
            .map(|g| g.rule.lr())
            .collect::<Vec<_>>()
    };
    assert_eq!(rates(&optimizer), [0.5, 0.25]);
    optimizer.set_learning_rate(0.125);
    assert_eq!(rates(&optimizer), [0.125, 0.125]);
    let error = optimizer.set_learning_rate_of(2, 0.1).unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "group", .. }),
        "{error}"
    );
    let error = optimizer.set_learning_rate_of(0, -0.1).unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "lr", .. }),
        "{error}"
    );
    assert_eq!(rates(&optimizer), [0.125, 0.125]);
}

#[test]
fn only_matrices_decay() {
    let matrix = Var::ones((2, 3), DType::F64, &Device::Cpu).unwrap();
    let vector = Var::ones(4, DType::F64, &Device::Cpu).unwrap();
    let scalar = Var::new(1f64, &Device::Cpu).unwrap();
    let config = AdamWConfig {
        lr: 0.1,
        weight_decay: 0.5,
        ..Default::default()
    };
    let groups = decay_matrices_only(named(&[&vector, &matrix, &scalar]), config);
    let mut optimizer = Optimizer::with_groups(groups).unwrap();
    let zeros = |var: &Var| Tensor::zeros(var.shape(), DType::F64, &Device::Cpu).unwrap();
    let all = [&matrix, &vector, &scalar].map(|var| (var, zeros(var)));
    optimizer.step(&store(&all)).unwrap();
    assert_eq!(elements(&matrix), [0.95; 6]);
    assert_eq!(
        (elements(&vector), elements(&scalar)),
        (vec![1.0; 4], vec![1.0])
    );
}

#[test]
fn a_variable_or_a_name_given_twice_is_refused() {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let config = AdamWConfig::default();
    refusal(
        Optimizer::with_groups(vec![
            group(&[("embedding", &a), ("b", &b)], config),
            group(&[("head", &a)], config),
        ]),
        &["embedding", "head"],
    );
    refusal(
        Optimizer::with_groups(vec![group(&[("same", &a), ("same", &b)], config)]),
        &["same"],
    );
}
