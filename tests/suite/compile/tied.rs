//! Models whose head is their embedding.

use super::{CPU, agree_of, batch, config, logits_of, model_and_optimizer, updating};
use crate::settings::{meta_of, with_lr, with_weights};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::model::TransformerLM;
use tallow::nn::Checkpointing;
use tallow::no_grad;
use tallow::optim::Optimizer;
use tallow::precision::Precision;

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
