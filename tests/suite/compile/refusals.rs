//! Steps that cannot be planned or run: the error names a remedy, and nothing changes.

use super::{CPU, batch, bits, config, logits_of, model_and_optimizer, plan_of};
use crate::check::refusal;
use crate::settings::{in_precision, meta_of, with_weights};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::nn;
use tallow::optim::{AdamWConfig, GradScaler, Optimizer};
use tallow::precision::{Precision, Regime};

#[rstest]
#[case(StepConfig { accumulation: 0, ..Default::default() }, &["StepConfig", "accumulation", "got 0"])]
#[case(StepConfig { clip_norm: Some(0.0), ..Default::default() }, &["clip_norm", "over 0"])]
#[case(StepConfig { clip_norm: Some(f64::NAN), ..Default::default() }, &["clip_norm", "NaN"])]
#[case(StepConfig { clip_value: Some(-1.0), ..Default::default() }, &["clip_value", "over 0"])]
#[case(
    StepConfig { optimizer_in_backward: true, clip_norm: Some(1.0), ..Default::default() },
    &["optimizer_in_backward", "clip_norm"]
)]
#[case(
    StepConfig { optimizer_in_backward: true, accumulation: 2, ..Default::default() },
    &["optimizer_in_backward", "accumulation"]
)]
#[case(
    StepConfig { optimizer_in_backward: true, loss_scaling: true, ..Default::default() },
    &["optimizer_in_backward", "loss_scaling"]
)]
#[case(
    in_precision(Precision::BF16.with_regime(Regime::Full)),
    &["precision", "bf16-full", "parameters stay in f32"]
)]
#[case(
    in_precision(Precision::F16.with_dropped_casts(true)),
    &["precision", "f16-dropping-casts", "one copy"]
)]
fn configurations(#[case] plan: StepConfig, #[case] words: &[&str]) {
    let meta = meta_of(&config(2, 2, 8, 24), Algorithm::Naive);
    let (model, optimizer) = model_and_optimizer(&meta);
    refusal(Step::for_model(&model, &optimizer, &plan), words);
    refusal(plan_of(&meta, &plan, [2, 10]), words);
}

/// Sizes (B, T) of a micro-batch that cannot be planned.
#[rstest]
#[case([0, 10], StepConfig::default(), &["B from 1", "[0, 10]"])]
#[case([2, 0], StepConfig::default(), &["T from 1", "[2, 0]"])]
#[case([2, 161], StepConfig::default(), &["T from 1 to 160", "[2, 161]", "context_length"])]
#[case([2, 160], StepConfig { accumulation: u32::MAX as usize, ..Default::default() }, &["one tensor"])]
#[case(
    [2, 10],
    StepConfig { memory_budget_bytes: Some(1000), ..Default::default() },
    &["memory_budget_bytes", "at least", "1000"]
)]
fn plans(#[case] sizes: [usize; 2], #[case] plan: StepConfig, #[case] words: &[&str]) {
    let (model, optimizer) = model_and_optimizer(&meta_of(&config(2, 2, 8, 24), Algorithm::Naive));
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let batch = Batch::meta(plan.accumulation * sizes[0], sizes[1]).unwrap();
    refusal(step.prepare(batch), words);
    assert!(step.plan().is_none());
}

#[test]
fn batches() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(2, 2, 8, 24), Algorithm::Naive));
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let mut forward = logits_of(&model, Precision::F32);
    let (tokens, targets) = batch(97, 2, 10, 0);
    let before = bits(&model);
    for (i, other) in [(2, 9), (1, 10), (3, 10)].into_iter().enumerate() {
        let (tokens, targets) = batch(97, other.0, other.1, 0);
        let loss = step.forward_backward((&tokens, &targets)).unwrap();
        let eager = model.loss(&tokens, &targets).unwrap();
        let eager: f32 = eager.to_scalar().unwrap();
        assert!((loss - eager).abs() <= 1e-6 * eager, "{loss} for {eager}");
        assert_eq!(step.plans().count(), i + 1);
    }
    let (_, longer) = batch(97, 2, 11, 0);
    let words = ["[2, 10]", "targets [2, 11]"];
    refusal(step.run(&mut optimizer, (&tokens, &longer)), &words);
    let float = tokens.to_dtype(DType::F32).unwrap();
    refusal(
        step.run(&mut optimizer, (&float, &targets)),
        &["u32", "f32"],
    );
    assert_eq!(step.plans().count(), 3); // a failed plan leaves the others
    let wide = tokens.to_dtype(DType::I64).unwrap();
    let below = (&wide - 100.0).unwrap();
    refusal(
        step.run(&mut optimizer, (&below, &targets)),
        &["id -", "97"],
    );
    let logits = |forward: &mut Step, tokens: &Tensor| {
        let logits = forward.forward([("tokens", tokens)]).unwrap();
        logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(logits(&mut forward, &wide), logits(&mut forward, &tokens));
    let mut ids: Vec<u32> = tokens.flatten_all().unwrap().to_vec1().unwrap();
    ids[13] = 97;
    let outside = Tensor::from_vec(ids, (2, 10), &CPU).unwrap();
    let words = ["id 97", "position 13", "97"];
    refusal(step.run(&mut optimizer, (&outside, &targets)), &words);
    refusal(step.run(&mut optimizer, (&tokens, &outside)), &words);
    refusal(forward.forward([("tokens", &outside)]), &words);
    assert_eq!((bits(&model), optimizer.steps()), (before, 0));
    step.run(&mut optimizer, (&tokens, &targets)).unwrap(); // the step still works
}

#[test]
fn optimizers() {
    let meta = meta_of(&config(2, 2, 8, 24), Algorithm::Naive);
    let (model, mut optimizer) = model_and_optimizer(&meta);
    let (_, mut other) = model_and_optimizer(&meta);
    let words = ["token_embeddings.weight", "model.parameters()"];
    refusal(
        Step::for_model(&model, &other, &StepConfig::default()),
        &words,
    );
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let (tokens, targets) = batch(97, 2, 10, 0);
    refusal(step.run(&mut other, (&tokens, &targets)), &words);

    let some = model.parameters().into_iter().skip(1);
    let some = Optimizer::new(some, AdamWConfig::default()).unwrap();
    refusal(
        Step::for_model(&model, &some, &StepConfig::default()),
        &words,
    );
    let stranger = Var::zeros(3, DType::F32, &CPU).unwrap();
    let more = model.parameters().into_iter();
    let more = more.chain([("stranger".to_string(), stranger)]);
    let more = Optimizer::new(more, AdamWConfig::default()).unwrap();
    refusal(
        Step::for_model(&model, &more, &StepConfig::default()),
        &["stranger"],
    );

    optimizer.set_learning_rate(f64::NAN);
    refusal(
        step.run(&mut optimizer, (&tokens, &targets)),
        &["lr", "NaN"],
    );
    assert_eq!(optimizer.steps(), 0);
}

#[test]
fn models() {
    let meta = meta_of(&config(1, 2, 8, 24), Algorithm::Naive);
    let half = nn::seeded(0, DType::BF16, &CPU);
    let half = with_weights(&meta, half);
    let optimizer = Optimizer::new(half.parameters(), AdamWConfig::default()).unwrap();
    let config = StepConfig::default();
    refusal(
        Step::for_model(&half, &optimizer, &config),
        &["f32", "bf16"],
    );
}

/// With clipping, gradients that are not finite are detected before the update.
#[test]
fn gradients_that_are_not_finite() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(2, 2, 8, 24), Algorithm::Naive));
    let plan = StepConfig {
        clip_norm: Some(1.0),
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let parameters: HashMap<_, _> = model.parameters().into_iter().collect();
    let norm = &parameters["layers.1.ln2.weight"];
    let good = norm.as_tensor().copy().unwrap();
    norm.set(&(&good * f64::INFINITY).unwrap()).unwrap();
    let before = bits(&model);
    let (tokens, targets) = batch(97, 2, 10, 0);
    let words = ["the gradient of parameter", "finite", "nothing was updated"];
    refusal(step.run(&mut optimizer, (&tokens, &targets)), &words);
    assert_eq!((bits(&model), optimizer.steps()), (before, 0));
    norm.set(&good).unwrap();
    assert!(
        step.run(&mut optimizer, (&tokens, &targets))
            .unwrap()
            .is_finite()
    );
}

/// A scaled run requires a plan with `loss_scaling`, and a scaler without unscaled gradients pending.
#[test]
fn loss_scales() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(1, 2, 8, 24), Algorithm::Naive));
    let mut scaler = GradScaler::new(Default::default()).unwrap();
    let (tokens, targets) = batch(97, 2, 10, 0);
    let before = bits(&model);
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets));
    refusal(done, &["loss_scaling", "or call run"]);

    let scaling = StepConfig {
        loss_scaling: true,
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &scaling).unwrap();
    let loss = model.loss(&tokens, &targets).unwrap();
    let mut gradients = scaler.scale(&loss).unwrap().backward().unwrap();
    scaler.unscale(&mut gradients, &model.parameters()).unwrap();
    let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets));
    refusal(done, &["unscaled gradients", "call update"]);
    assert_eq!((bits(&model), optimizer.steps()), (before, 0));
    scaler.update().unwrap();
    step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets))
        .unwrap();
    assert_eq!(optimizer.steps(), 1);
}

#[test]
fn what_is_read_too_early_or_never_there() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(1, 2, 8, 24), Algorithm::Naive));
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    refusal(step.gradients(), &["no step has been run"]);
    assert_eq!(step.gradient_norm(), None);
    let (tokens, targets) = batch(97, 2, 10, 0);
    step.run(&mut optimizer, (&tokens, &targets)).unwrap();
    assert_eq!(step.gradient_norm(), None); // nothing was clipped
    let in_backward = StepConfig {
        optimizer_in_backward: true,
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &in_backward).unwrap();
    step.run(&mut optimizer, (&tokens, &targets)).unwrap();
    refusal(
        step.gradients(),
        &["freed in backward", "optimizer_in_backward"],
    );
}
