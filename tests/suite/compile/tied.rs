//! Models whose head is their embedding, and losses of their hidden states.

use super::{CPU, agree_of, batch, config, logits_of, model_and_optimizer, updating};
use crate::settings::{in_precision, meta_of, with_lr, with_weights};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::Algorithm;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::model::TransformerLM;
use tallow::nn::{Checkpointing, ForwardContext};
use tallow::optim::Optimizer;
use tallow::precision::{Autocast, Precision};
use tallow::{autocast, no_grad, ops};

/// Returns a model whose embedding and head are one variable.
fn tied(meta: &TransformerLM) -> (TransformerLM, Optimizer) {
    let (model, _) = model_and_optimizer(meta);
    let weights = model.parameters().into_iter();
    let weights = weights.map(|(name, var)| (name, var.as_tensor().clone()));
    let mut weights: HashMap<String, Tensor> = weights.collect();
    let table = weights["token_embeddings.weight"].clone();
    weights.insert("lm_head.weight".into(), table);
    let vb = VarBuilder::from_tensors(weights, DType::F32, &CPU);
    let model = with_weights(meta, vb);
    let optimizer = Optimizer::new(model.parameters(), with_lr(3e-3)).unwrap();
    (model, optimizer)
}

/// The embedding's gradient is the sum of both uses, and the update follows both.
#[rstest]
fn steps(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values(1, 3)] accumulation: usize,
    #[values(false, true)] optimizer_in_backward: bool,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
) {
    if optimizer_in_backward && accumulation > 1 {
        return; // cannot be combined
    }
    let plan = updating(precision, accumulation, optimizer_in_backward);
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Flash).with_checkpointing(checkpointing);
    agree_of(|| tied(&meta), &plan, [2, 33]);
}

/// A tied weight is one parameter with one gradient and one update; the forward alone equals eager's.
#[test]
fn once_each() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let (model, optimizer) = tied(&meta);
    let (tokens, targets) = batch(97, 2, 9, 0);
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let calls = step.prepare((&tokens, &targets)).unwrap().calls();
    let count = |name: &str| calls.iter().filter(|call| call.op.name() == name).count();
    assert_eq!(count("adamw"), model.parameters().len());
    let mut forward = logits_of(&model, Precision::F32);
    let wanted = no_grad(|| model.forward(&tokens)).unwrap();
    let got = forward.forward([("tokens", &tokens)]).unwrap();
    assert!(super::distance(&got, &wanted) < 2e-6);
}

/// A loss of the hidden states: next token, and a contrastive term between the halves of the batch, whose targets are a
/// constant of the function. The losses of planned steps are those of eager ones, which after the first step depend on
/// the updates.
#[rstest]
fn with_a_contrastive_term(#[values(Precision::F32, Precision::BF16)] precision: Precision) {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Flash);
    let positives = Tensor::arange(0u32, 2, &CPU).unwrap();
    let loss_of = |model: &TransformerLM, tokens: &Tensor, targets: &Tensor| {
        let hidden = model.hidden_states(tokens, &ForwardContext::default())?; // (4, T, D)
        let next_token = ops::linear_cross_entropy(&hidden, model.head().weight(), targets)?;
        let pooled = ops::mean_over(&hidden, 1)?; // (4, D)
        let (a, b) = (pooled.narrow(0, 0, 2)?, pooled.narrow(0, 2, 2)?);
        let similarities = autocast(Autocast::disabled(), || ops::matmul(&a, &b.t()?))?;
        assert_eq!(similarities.dtype(), DType::F32);
        let contrastive = ops::cross_entropy(&similarities, &positives)?;
        ops::add_scaled(&next_token, &contrastive, 0.1)
    };
    let (planned, mut planned_optimizer) = tied(&meta);
    let loss = |inputs: &Inputs| loss_of(&planned, &inputs.get("tokens")?, &inputs.get("targets")?);
    let mut step = Step::new(&planned_optimizer, &in_precision(precision), loss).unwrap();
    let (eager, mut eager_optimizer) = tied(&meta);
    let tolerance = if precision == Precision::F32 {
        1e-5
    } else {
        2e-2
    };
    for i in 0..3 {
        let (tokens, targets) = batch(97, 4, 9, i);
        let inputs = [("tokens", &tokens), ("targets", &targets)];
        let got = step.run(&mut planned_optimizer, inputs).unwrap();
        let wanted = precision
            .run(|| loss_of(&eager, &tokens, &targets))
            .unwrap();
        let gradients = tallow::backward(wanted.clone()).unwrap();
        eager_optimizer.step(&gradients).unwrap();
        let wanted = wanted.to_scalar::<f32>().unwrap();
        assert!(
            (got / wanted - 1.0).abs() < tolerance,
            "{i}: {got} {wanted}"
        );
    }
}
