//! Attention with masks and biases in tensors: planned as eager, with masks that differ from run to run.

use super::{CPU, distance};
use crate::check::{elements, refusal};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use tallow::attention::{Algorithm, AttentionConfig, KeyMask, Mask, ScoreBias};
use tallow::compile::{Batch, Inputs, Plan, PlanKind, Step, StepConfig, Target};
use tallow::graph;
use tallow::ops::{Dropout, DropoutKey};

const SHAPE: [usize; 4] = [2, 4, 70, 16];

fn draw(dims: &[usize], dtype: DType) -> Var {
    let x = Tensor::randn(0f32, 1.0, dims, &CPU).unwrap();
    Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()
}

/// Options of attention other than key mask and bias.
fn others(i: usize) -> AttentionConfig {
    let dropout = || Dropout {
        probability: 0.2,
        key: DropoutKey::new(1, 2).unwrap(),
    };
    AttentionConfig {
        mask: [Mask::Full, Mask::Causal][i % 2],
        soft_cap: (i % 3 == 1).then_some(2.0),
        dropout: (i == 2).then(dropout),
        ..Default::default()
    }
}

#[rstest]
fn planned_is_eager(
    #[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm,
    #[values(DType::F32, DType::F64, DType::BF16)] dtype: DType,
    #[values(0, 1, 2)] i: usize,
) {
    let [q, k, v] = [SHAPE, [2, 2, 70, 16], [2, 2, 70, 16]].map(|dims| draw(&dims, dtype));
    let bias = draw(&[4, 70, 70], dtype);
    let attend = {
        let [q, k, v, bias] = [&q, &k, &v, &bias].map(Var::clone);
        move |key_mask: KeyMask| {
            let config = AttentionConfig {
                key_mask: Some(key_mask),
                bias: Some(ScoreBias::new(&bias)?),
                ..others(i)
            };
            algorithm.attend(&q, &k, &v, &config)
        }
    };
    let names = ["q", "k", "v", "bias"].map(String::from);
    let variables = [&q, &k, &v, &bias];
    let parameters = names.into_iter().zip(variables.map(Var::clone)).collect();
    let config = StepConfig::default();
    let planned = attend.clone();
    let mut step = Step::without_optimizer(&CPU, parameters, &config, move |inputs: &Inputs| {
        planned(KeyMask::padding(&inputs.get("key_mask")?)?)
    })
    .unwrap();
    let d_out = draw(&SHAPE, dtype);
    for lengths in [[70, 31], [3, 0]] {
        let key_mask = KeyMask::of_lengths(&lengths, 70).unwrap();
        let batch = Batch::new([("key_mask", key_mask.tensor())]);
        step.forward_backward_from(batch, &d_out).unwrap();
        let eager = attend(key_mask).unwrap();
        let found = step.output().unwrap();
        let bound = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
        let near = |found: &Tensor, wanted: &Tensor, what: &str| match algorithm {
            Algorithm::Flash => assert_eq!(elements(found), elements(wanted), "{what}"),
            Algorithm::Naive => {
                let off = distance(found, wanted);
                assert!(off <= bound, "{what} {dtype:?} {i}: {off:.1e}");
            }
        };
        near(&found, &eager, "out");
        let store = tallow::backward_from(eager, &d_out).unwrap();
        let gradients = step.gradients().unwrap();
        for ((name, found), variable) in gradients.iter().zip(variables) {
            near(found, store.get(variable).unwrap(), name);
        }
    }
}

fn plan_for(
    target: Target,
    algorithm: Algorithm,
    [masked, biased]: [bool; 2],
) -> tallow::Result<Plan> {
    let weights = graph::weights(DType::F32);
    let [q, k, v] = ["q", "k", "v"].map(|name| weights.get(&SHAPE[..], name).unwrap());
    let bias = weights.get((4, 1, 70), "bias").unwrap();
    let key_mask = graph::input("key_mask", (2, 70), DType::U8).unwrap();
    let inputs: &[_] = if masked {
        &[("key_mask", &key_mask)]
    } else {
        &[]
    };
    let config = StepConfig::default();
    let batch = Batch::new(inputs.iter().copied());
    Step::plan_for(target, PlanKind::Gradients, &config, batch, |inputs| {
        let key_mask = masked.then(|| KeyMask::padding(&inputs.get("key_mask")?));
        let config = AttentionConfig {
            key_mask: key_mask.transpose()?,
            bias: biased.then(|| ScoreBias::new(&bias)).transpose()?,
            ..Default::default()
        };
        algorithm.attend(&q, &k, &v, &config)
    })
}

#[test]
fn a_gpu_plans_naive_and_refuses_flash() {
    for which in [[true, false], [false, true], [true, true]] {
        plan_for(Target::Cuda, Algorithm::Naive, which).unwrap();
        plan_for(Target::Cpu, Algorithm::Naive, which).unwrap();
        plan_for(Target::Cpu, Algorithm::Flash, which).unwrap();
        let field = if which[0] { "key_mask" } else { "bias" };
        let parts = ["AttentionConfig", field, "GPU", "attention::naive"];
        refusal(plan_for(Target::Cuda, Algorithm::Flash, which), &parts);
    }
}
