//! Dropout in planned steps drops the elements that eager steps drop, and others in each step and micro-batch.

use super::{batch, distance, plan_of};
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Architecture, Checkpointing, DropoutRates, ForwardContext};
use tallow::ops::DropoutKey;
use tallow::optim::{AdamWConfig, GradientAccumulator, Optimizer};
use tallow::precision::Precision;

const SEED: u64 = 11;

fn config(architecture: Architecture) -> TransformerConfig {
    TransformerConfig {
        architecture,
        dropout: DropoutRates {
            embedding: 0.2,
            attention: 0.1,
            residual: 0.3,
        },
        ..super::config(2, 4, 16, 96)
    }
}

/// The batch size and the length of a micro-batch.
const SIZES: [usize; 2] = [2, 33];

/// Compares two steps with the loss and the gradients of eager ones with the same dropout key.
fn as_eager(meta: &TransformerLM, plan: &StepConfig, separator: Option<u32>, device: &Device) {
    let model = with_weights(meta, nn::seeded(5, DType::F32, device));
    let eager = model.clone().with_checkpointing(Checkpointing::None);
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = Step::for_model(&model, &optimizer, plan).unwrap();
    let computed = (model.attention(), model.checkpointing());
    let what = format!("{:?} {computed:?} {plan:?} {separator:?}", model.config());
    let bound = if plan.precision == Precision::F32 {
        2e-5
    } else {
        2e-2
    };
    let mut losses = Vec::new();
    for i in 0..2 {
        let [batch_size, length] = SIZES;
        let (tokens, targets) = batch(97, plan.accumulation * batch_size, length, 0);
        let here = |x: &Tensor| x.to_device(device).unwrap();
        let (tokens, targets) = (here(&tokens), here(&targets));

        let mut sum = GradientAccumulator::new(model.parameters());
        let mut wanted = 0.0;
        for part in 0..plan.accumulation {
            let rows = |x: &Tensor| x.narrow(0, part * batch_size, batch_size).unwrap();
            let key = DropoutKey::of_micro_batch(SEED, i, part).unwrap();
            let (tokens, targets) = (rows(&tokens), rows(&targets));
            let loss = || match separator {
                Some(id) => eager.loss_of_documents(&tokens, &targets, id, Some(&key)),
                None => {
                    let context = ForwardContext::training(key.clone());
                    eager.loss_with(&tokens, &targets, &context, None)
                }
            };
            let loss = plan.precision.run(loss).unwrap();
            wanted += loss.to_scalar::<f32>().unwrap() / plan.accumulation as f32;
            sum.add(tallow::backward(loss).unwrap()).unwrap();
        }
        let mean = sum.mean().unwrap();

        let documents = Batch::masked(&tokens, &targets, separator, None).unwrap();
        let found = step.run(&mut optimizer, documents).unwrap();
        assert!(
            (found - wanted).abs() <= bound as f32,
            "{what}, step {i}: {found} {wanted}"
        );
        let planned: HashMap<String, Tensor> = step.gradients().unwrap().into_iter().collect();
        for (name, parameter) in model.parameters() {
            // A bias shared by all keys shifts all scores of a query alike; its gradient is rounding error on both
            // sides.
            if !(name.ends_with("k_proj.bias")) {
                let error = distance(&planned[&name], mean.get(&parameter).unwrap());
                assert!(
                    error <= bound,
                    "{what}, step {i}: {name} is {error:.1e} off"
                );
            }
        }
        losses.push(found);
    }
    assert_ne!(losses[0], losses[1]);
}

fn every_case_is_as_eager(attention: Algorithm, architecture: Architecture, device: &Device) {
    let recomputed = Checkpointing::Every(NonZeroUsize::MIN);
    for (precision, accumulation, checkpointing, separator) in [
        (Precision::F32, 1, Checkpointing::None, None),
        (Precision::F32, 1, recomputed, Some(3)),
        (Precision::F32, 3, recomputed, None),
        (Precision::BF16, 2, Checkpointing::None, None),
        (Precision::BF16, 1, Checkpointing::None, Some(3)),
    ] {
        let plan = StepConfig {
            dropout_seed: Some(SEED),
            precision,
            accumulation,
            ..Default::default()
        };
        let model = meta_of(&config(architecture), attention).with_checkpointing(checkpointing);
        as_eager(&model, &plan, separator, device);
    }
}

#[rstest]
fn planned_is_as_eager(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture,
) {
    every_case_is_as_eager(attention, architecture, &Device::Cpu);
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn planned_is_as_eager_on_a_gpu(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture,
) {
    every_case_is_as_eager(attention, architecture, &crate::gpu());
}

/// Without a seed, or with rates of 0, a plan has no dropout calls.
#[test]
fn nothing_is_dropped_unless_it_is_asked_for() {
    let rates = config(Architecture::Llama);
    let none = TransformerConfig {
        dropout: DropoutRates::default(),
        ..rates.clone()
    };
    let plan = |model: &TransformerConfig, dropout_seed| {
        let config = StepConfig {
            dropout_seed,
            ..Default::default()
        };
        let meta = TransformerLM::meta(model).unwrap();
        plan_of(&meta, &config, [4, 33]).unwrap().0.explain()
    };
    let bare = plan(&none, None);
    assert!(!bare.contains("dropout"));
    assert_eq!(plan(&rates, None), bare);
    assert_eq!(plan(&none, Some(1)), bare);
    let calls = plan(&rates, Some(1));
    assert!(calls.contains("dropout_backward"), "{calls}");
}
