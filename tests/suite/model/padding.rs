//! The padding token: its row of the embedding has no gradient, and nothing else changes.

use super::*;
use crate::settings::in_precision;
use candle_nn::VarMap;
use rstest::rstest;
use std::collections::HashMap;
use tallow::compile::Step;
use tallow::nn::{Embedding, Layer};
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;

const PADDING: u32 = 3;

/// Returns models with the same weights, without and with a padding token.
fn models(tie_embeddings: bool, dtype: DType) -> [TransformerLM; 2] {
    [None, Some(PADDING)].map(|padding_id| {
        let config = TransformerConfig {
            tie_embeddings,
            padding_id,
            ..mini()
        };
        model_of(&config, 1, dtype)
    })
}

/// Returns tokens and targets (2, 8) with the padding token in both: alone, repeated, and more than 8 times.
fn batch() -> [Tensor; 2] {
    let tokens = [[3u32, 5, 3, 28, 3, 3, 3, 3], [3, 3, 9, 5, 3, 3, 3, 3]];
    let targets = [[5u32, 3, 28, 3, 3, 1, 2, 0], [3, 9, 5, 3, 3, 4, 3, 3]];
    [tokens, targets].map(|ids| Tensor::new(&ids, &CPU).unwrap())
}

fn row(table: &Tensor, id: u32) -> Tensor {
    table.get(id as usize).unwrap()
}

/// Checks that all gradients have the same bits, except the padding token's row of the embedding, which is returned.
fn assert_same_but_padding(plain: &[(String, Tensor)], padded: &[(String, Tensor)]) -> Tensor {
    assert_eq!(plain.len(), padded.len());
    for ((name, plain), (other, padded)) in plain.iter().zip(padded) {
        assert_eq!(name, other);
        if name != "token_embeddings.weight" {
            assert_eq!(bits(plain), bits(padded), "{name}");
            continue;
        }
        for id in (0..29).filter(|id| *id != PADDING) {
            assert_eq!(bits(&row(plain, id)), bits(&row(padded, id)), "row {id}");
        }
        let row = row(plain, PADDING);
        assert!(
            elements(&row).iter().all(|g| *g != 0.0),
            "it has none without padding"
        );
    }
    row(&padded[0].1, PADDING)
}

fn eager(model: &TransformerLM) -> (Tensor, Vec<(String, Tensor)>) {
    let [tokens, targets] = batch();
    let loss = model.loss(&tokens, &targets).unwrap();
    let gradients = tallow::backward(loss.clone()).unwrap();
    let parameters = model.parameters().into_iter();
    let gradients = parameters.map(|(name, var)| (name, gradients.get(&var).unwrap().clone()));
    (loss, gradients.collect())
}

fn planned(model: &TransformerLM, precision: Precision) -> Vec<(String, Tensor)> {
    let optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let config = in_precision(precision);
    let mut step = Step::for_model(model, &optimizer, &config).unwrap();
    let [tokens, targets] = batch();
    step.forward_backward((&tokens, &targets)).unwrap();
    step.gradients().unwrap()
}

#[rstest]
fn an_eager_step(
    #[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
) {
    with_kernel_policy(policy, || {
        let [(loss, plain), (padded_loss, padded)] = models(false, dtype).each_ref().map(eager);
        assert_eq!(bits(&loss), bits(&padded_loss));
        let row = assert_same_but_padding(&plain, &padded);
        assert!(elements(&row).iter().all(|g| *g == 0.0), "{row}");
    });
}

#[rstest]
fn a_planned_step(#[values(Precision::F32, Precision::BF16)] precision: Precision) {
    let models = models(false, DType::F32);
    let [plain, padded] = models.each_ref().map(|model| planned(model, precision));
    let row = assert_same_but_padding(&plain, &padded);
    assert!(elements(&row).iter().all(|g| *g == 0.0), "{row}");
    if precision == Precision::F32 {
        for ((name, planned), (_, eager)) in padded.iter().zip(eager(&models[1]).1) {
            close(name, planned, &eager, 2e-6);
        }
    }
}

/// A tied head still trains the row, with the gradient that it would have alone.
#[rstest]
fn a_tied_head(#[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy) {
    let tied = models(true, DType::F32);
    let weights: HashMap<String, Tensor> = tied[1].weights().into_iter().collect();
    let head = weights["token_embeddings.weight"].detach().copy().unwrap();
    let untied = TransformerConfig {
        tie_embeddings: false,
        ..tied[1].config().clone()
    };
    let weights = weights
        .into_iter()
        .chain([("lm_head.weight".into(), head)])
        .collect();
    let vb = VarBuilder::from_tensors(weights, DType::F32, &CPU);
    let untied = TransformerLM::from_var_builder(&untied, vb).unwrap();
    with_kernel_policy(policy, || {
        let (_, of_untied) = eager(&untied);
        let (name, of_head) = of_untied.last().unwrap();
        assert_eq!(name, "lm_head.weight");
        let wanted = row(of_head, PADDING);
        let [plain, padded] = tied.each_ref().map(|model| eager(model).1);
        close(
            "eager",
            &assert_same_but_padding(&plain, &padded),
            &wanted,
            1e-6,
        );
        if policy == KernelPolicy::Strict {
            let [plain, padded] = tied.each_ref().map(|model| planned(model, Precision::F32));
            close(
                "planned",
                &assert_same_but_padding(&plain, &padded),
                &wanted,
                1e-6,
            );
        }
    });
}

#[test]
fn a_layer_alone() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &CPU);
    let layer = Embedding::new(5, 2, vb).unwrap().with_padding(Some(4));
    let tokens = Tensor::new(&[4i64, 1, 4], &CPU).unwrap();
    let rows = layer.forward(&tokens).unwrap();
    let table = layer.weight();
    assert_eq!(bits(&row(&rows, 0)), bits(&row(table, 4)));
    let gradients = gradients_of(&rows.sum_all().unwrap(), layer.parameters());
    let wanted = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(elements(&gradients[0].1), wanted);
    let outside = layer.with_padding(Some(5));
    refusal(
        outside.forward(&tokens),
        &["embedding", "padding_id", "under", "5"],
    );
}

#[test]
fn ids_that_are_refused() {
    let config = |padding_id| TransformerConfig {
        padding_id: Some(padding_id),
        ..mini()
    };
    config(28).validate().unwrap();
    refusal(
        config(29).validate(),
        &["padding_id must be under vocab_size 29, got 29"],
    );
}
