//! The same numbers as the eager step.

use super::{agree, batch, config, distance, eager_step, model_and_optimizer};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Forward, PlanConfig, TrainStep};
use tallow::model::TransformerConfig;
use tallow::no_grad;

fn plan(batch_size: usize, sequence_length: usize) -> PlanConfig {
    PlanConfig {
        batch_size,
        sequence_length,
        ..Default::default()
    }
}

#[rstest]
fn odd_shapes(
    #[values((1, 1), (3, 1), (1, 64), (2, 123), (3, 65))] shape: (usize, usize),
    #[values((2, 24), (3, 40), (1, 2))] heads: (usize, usize),
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let (heads, head_dim) = heads;
    let model = config(2, heads, head_dim, 56, attention);
    agree(&model, &plan(shape.0, shape.1));
}

/// The presets' proportions, a sixteenth as wide and few layers; the vocabulary larger than a chunk of logits takes.
#[rstest]
fn small_versions_of_the_presets(
    #[values("tiny", "small", "medium", "large", "xl", "wide", "2.7b", "10b")] name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let preset = TransformerConfig::preset(name).unwrap();
    let heads = preset.num_heads.div_ceil(8);
    let head_dim = (preset.head_dim() / 4).next_multiple_of(2);
    let model = TransformerConfig {
        num_layers: 2,
        d_model: heads * head_dim,
        num_heads: heads,
        d_ff: preset.d_ff / 16,
        vocab_size: 30_000,
        attention,
        ..preset
    };
    agree(&model, &plan(2, 70));
}

#[rstest]
fn forward_alone(
    #[values((1, 1), (2, 123))] shape: (usize, usize),
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model_config = config(3, 2, 24, 56, attention);
    let (model, _) = model_and_optimizer(&model_config);
    let mut forward = Forward::new(&model, &plan(shape.0, shape.1)).unwrap();
    for step in 0..2 {
        let (tokens, _) = batch(97, shape.0, shape.1, step);
        let wanted = no_grad(|| model.forward(&tokens)).unwrap();
        let got = forward.run(&tokens).unwrap();
        let error = distance(&got, &wanted);
        assert!(error <= 2e-6, "{error:.1e}");
    }
}

/// Two hundred steps of training: the curves stay together, though each step's rounding is the next one's start.
#[test]
fn two_hundred_steps() {
    let model_config = config(2, 2, 16, 64, Algorithm::Naive);
    let (eager, mut eager_optimizer) = model_and_optimizer(&model_config);
    let (planned, mut planned_optimizer) = model_and_optimizer(&model_config);
    for optimizer in [&mut eager_optimizer, &mut planned_optimizer] {
        optimizer.set_learning_rate(1e-3);
    }
    let plan = PlanConfig {
        clip_norm: Some(1.0),
        ..plan(4, 32)
    };
    let mut step = TrainStep::new(&planned, &planned_optimizer, &plan).unwrap();
    let mut last = f32::NAN;
    for i in 0..200 {
        let batch = batch(97, 4, 32, i % 10);
        let loss = eager_step(&eager, &mut eager_optimizer, &batch, plan.clip_norm);
        let got = step
            .run(&mut planned_optimizer, &batch.0, &batch.1)
            .unwrap();
        let error = (got - loss).abs() / loss;
        assert!(error <= 1e-5, "step {i}: {got} for {loss}");
        last = loss;
    }
    assert!(last < 2.5, "{last}: it has learnt something");
}
