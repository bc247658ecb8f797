//! All rules: against PyTorch and plain Python in f64 (`fixtures/optimizers.py`), kernels against references, threads,
//! state files, and hyperparameters that are refused.

use super::{elements, named, noise, noisy_gradient, relative, store, var};
use crate::check::refusal;
use crate::golden::fixture;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use std::collections::BTreeMap;
use tallow::optim::{
    AdamWConfig, LionConfig, Optimizer, ParameterGroup, Rule, Schedule, SgdConfig,
};

/// Returns the rules with all of their branches.
pub(super) fn rules() -> Vec<Rule> {
    let sgd = SgdConfig {
        lr: 0.05,
        weight_decay: 0.1,
        ..Default::default()
    };
    let momentum = SgdConfig {
        momentum: 0.9,
        ..sgd
    };
    vec![
        AdamWConfig::default().into(),
        sgd.into(),
        momentum.into(),
        SgdConfig {
            nesterov: true,
            ..momentum
        }
        .into(),
        SgdConfig {
            dampening: 0.25,
            ..momentum
        }
        .into(),
        LionConfig {
            lr: 0.01,
            weight_decay: 0.3,
            ..Default::default()
        }
        .into(),
    ]
}

/// Twenty steps in f64, by the kernel and by the reference.
#[test]
fn twenty_steps_are_pytorchs() {
    let (tensors, metadata) = fixture("optimizers");
    let cases: BTreeMap<String, Rule> = serde_json::from_str(&metadata["cases"]).unwrap();
    assert!(cases.len() >= 8);
    let shapes = ["wide", "tall", "square"];
    for (case, rule) in cases {
        for by_reference in [false, true] {
            let start = shapes.map(|name| tensors[&format!("start.{name}")].copy().unwrap());
            let vars = start.map(|start| Var::from_tensor(&start).unwrap());
            let parameters = shapes.map(String::from).into_iter().zip(vars.clone());
            let mut optimizer = Optimizer::new(parameters, rule).unwrap();
            for step in 0..20 {
                let of = |name| tensors[&format!("gradients.{name}")].get(step).unwrap();
                let gradients: Vec<_> = vars.iter().zip(shapes.map(of)).collect();
                match by_reference {
                    false => optimizer.step(&store(&gradients)).unwrap(),
                    true => optimizer.step_reference(&store(&gradients)).unwrap(),
                }
            }
            for (name, var) in shapes.iter().zip(&vars) {
                let expected = elements(&tensors[&format!("{case}.{name}")]);
                let error = relative(&elements(var), &expected);
                assert!(error < 1e-12, "{case}, {name}: {error:e}");
            }
        }
    }
}

#[test]
fn schedules_are_pytorchs() {
    let (tensors, metadata) = fixture("optimizers");
    let schedules: BTreeMap<String, Schedule> =
        serde_json::from_str(&metadata["schedules"]).unwrap();
    assert_eq!(schedules.len(), 4);
    for (name, schedule) in schedules {
        schedule.validate().unwrap();
        let expected = elements(&tensors[&format!("schedule.{name}")]);
        for (t, expected) in expected.iter().enumerate() {
            let off = (schedule.learning_rate(t) - expected).abs();
            assert!(off < 1e-15, "{name}, step {t}: {off:e}");
        }
    }
}

/// Returns parameters and state after a few steps.
fn run(n: usize, dtype: DType, rule: Rule, by_reference: bool) -> Vec<Vec<f64>> {
    let (a, b) = (var(&noise(n, 5), dtype), var(&noise(3, 6), dtype));
    let mut optimizer = Optimizer::new(named(&[&a, &b]), rule).unwrap();
    for t in 0..4 {
        let gradients = [&a, &b].map(|var| (var, noisy_gradient(var, 5 + t)));
        match by_reference {
            false => optimizer.step(&store(&gradients)).unwrap(),
            true => optimizer.step_reference(&store(&gradients)).unwrap(),
        }
    }
    let state = optimizer.state().into_iter();
    let state = state.map(|(_, tensor)| elements(&tensor));
    [elements(&a), elements(&b)]
        .into_iter()
        .chain(state)
        .collect()
}

#[rstest]
#[case(DType::F64, 1e-13)]
#[case(DType::F32, 1e-5)]
#[case(DType::BF16, 1e-5)]
#[case(DType::F16, 1e-5)]
fn kernels_equal_their_references(#[case] dtype: DType, #[case] tolerance: f64) {
    for rule in rules() {
        for n in [1, 31, 513, 16_385] {
            let kernel = run(n, dtype, rule, false);
            let reference = run(n, dtype, rule, true);
            assert_eq!(kernel.len(), reference.len());
            for (i, (kernel, reference)) in kernel.iter().zip(&reference).enumerate() {
                let is_rounded = i < 2 && matches!(dtype, DType::BF16 | DType::F16);
                let tolerance = if is_rounded { 1e-3 } else { tolerance };
                let error = relative(kernel, reference);
                assert!(error < tolerance, "{rule}, entry {i} of {n}: {error:e}");
            }
        }
    }
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    for rule in rules() {
        for dtype in [DType::F32, DType::BF16] {
            let with_threads = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                let pool = pool.build().unwrap();
                pool.install(|| run(100_003, dtype, rule, false))
            };
            assert_eq!(with_threads(1), with_threads(3), "{rule}, {dtype:?}");
        }
    }
}

/// Groups of one optimizer may have different rules. Saved and resumed, they continue with the same bits.
#[rstest]
fn rules_are_saved_and_resumed(#[values(DType::F32, DType::F64, DType::F16)] dtype: DType) {
    let setup = || {
        let rules = rules();
        let vars: Vec<Var> = (0..rules.len()).map(|i| var(&noise(9, i), dtype)).collect();
        let groups = named(&vars.iter().collect::<Vec<_>>())
            .into_iter()
            .zip(rules);
        let groups = groups.map(|(parameter, rule)| ParameterGroup {
            parameters: vec![parameter],
            rule,
        });
        let optimizer = Optimizer::with_groups(groups.collect()).unwrap();
        (vars, optimizer)
    };
    let steps = |vars: &[Var], optimizer: &mut Optimizer, range: std::ops::Range<usize>| {
        for t in range {
            let gradients = vars.iter().map(|var| (var, noisy_gradient(var, t)));
            optimizer
                .step(&store(&gradients.collect::<Vec<_>>()))
                .unwrap();
        }
    };
    let all = |vars: &[Var], optimizer: &Optimizer| -> Vec<Vec<f64>> {
        let state = optimizer.state().into_iter();
        let state = state.map(|(_, tensor)| elements(&tensor));
        vars.iter().map(|var| elements(var)).chain(state).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup();
    steps(&vars, &mut optimizer, 0..3);
    optimizer.save(&path).unwrap();
    let saved: Vec<Tensor> = vars.iter().map(|var| var.copy().unwrap()).collect();
    steps(&vars, &mut optimizer, 3..6);

    let (others, mut resumed) = setup();
    resumed.set_learning_rate(7.0); // the saved rules replace it
    for (var, saved) in others.iter().zip(&saved) {
        var.set(saved).unwrap();
    }
    resumed.load(&path).unwrap();
    steps(&others, &mut resumed, 3..6);
    assert_eq!(all(&others, &resumed), all(&vars, &optimizer));
}

/// A rule states its tensors; the optimizer allocates these.
#[test]
fn state_is_what_the_rule_states() {
    for rule in rules() {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let weight = var(&[1.0, 2.0], dtype);
            let optimizer = Optimizer::new(named(&[&weight]), rule).unwrap();
            let stated: Vec<_> = rule.state(dtype);
            let state = optimizer.state();
            let state = state.iter().map(|(name, tensor)| (name.as_str(), tensor));
            let found: Vec<_> = state
                .map(|(name, tensor)| (name.strip_suffix(".a").unwrap(), tensor.dtype()))
                .collect();
            assert_eq!(found, stated, "{rule}");
        }
    }
}

/// A step with a NaN in a gradient is seen in the weight.
#[test]
fn nan_is_not_hidden() {
    for rule in rules() {
        for by_reference in [false, true] {
            let weight = var(&[1.0, 2.0], DType::F32);
            let mut optimizer = Optimizer::new(named(&[&weight]), rule).unwrap();
            let gradient = Tensor::new(&[f32::NAN, 1.0], &Device::Cpu).unwrap();
            let gradients = store(&[(&weight, gradient)]);
            match by_reference {
                false => optimizer.step(&gradients).unwrap(),
                true => optimizer.step_reference(&gradients).unwrap(),
            }
            let moved = elements(&weight);
            assert!(moved[0].is_nan() && moved[1].is_finite(), "{rule}");
        }
    }
}

#[rstest]
#[case(SgdConfig { lr: -1.0, ..Default::default() }, "SgdConfig: lr must be at least 0")]
#[case(SgdConfig { momentum: 1.0, ..Default::default() }, "SgdConfig: momentum must be at least 0 and under 1, got 1")]
#[case(SgdConfig { dampening: -0.1, ..Default::default() }, "SgdConfig: dampening must be at least 0 and under 1")]
#[case(SgdConfig { weight_decay: f64::NAN, ..Default::default() }, "SgdConfig: weight_decay must be at least 0")]
#[case(
    SgdConfig { nesterov: true, ..Default::default() },
    "SgdConfig: nesterov must be false without momentum or with dampening, got true, with momentum 0"
)]
#[case(LionConfig { lr: f64::INFINITY, ..Default::default() }, "LionConfig: lr must be at least 0")]
#[case(LionConfig { betas: (0.9, 1.0), ..Default::default() }, "LionConfig: betas.1 must be at least 0 and under 1")]
#[case(
    LionConfig { lr: 1e20, weight_decay: 1e20, ..Default::default() },
    "LionConfig: weight_decay must be such that lr * weight_decay, 1e40, is finite in f32"
)]
fn bad_hyperparameters(#[case] rule: impl Into<Rule>, #[case] text: &str) {
    let weight = var(&[1.0], DType::F32);
    refusal(Optimizer::new(named(&[&weight]), rule), &[text]);
}
