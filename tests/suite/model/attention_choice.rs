//! The configured attention algorithm: another way to compute the same numbers, from the same weights.

use super::*;
use crate::settings::causal;
use candle_core::safetensors;
use rstest::rstest;
use std::collections::HashMap;
use tallow::model::GenerateConfig;
use tallow::nn::{Attention, TransformerBlock};
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tempfile::tempdir;

/// Returns a configuration with three heads of `head_dim` elements.
fn heads_of(head_dim: usize) -> TransformerConfig {
    TransformerConfig {
        context_length: 257,
        d_model: 3 * head_dim,
        ..mini()
    }
}

/// Returns a model whose weights are drawn in f32 and equal in each dtype.
fn twin(attention: Algorithm, head_dim: usize, dtype: DType) -> TransformerLM {
    let drawn = model_of(&heads_of(head_dim), 1, DType::F32);
    let weights = drawn.parameters().into_iter();
    let weights: HashMap<String, Tensor> = weights
        .map(|(name, var)| (name, var.to_dtype(dtype).unwrap().detach()))
        .collect();
    let vb = VarBuilder::from_tensors(weights, dtype, &CPU);
    let model = TransformerLM::from_var_builder(&heads_of(head_dim), vb).unwrap();
    model.with_attention(attention).unwrap()
}

/// Returns logits, loss and every gradient, by name.
fn everything(model: &TransformerLM, length: usize, policy: KernelPolicy) -> Vec<(String, Tensor)> {
    let tokens = ids(29, 2, length);
    let targets = ids(29, length, 2).t().unwrap();
    with_kernel_policy(policy, || {
        let logits = model.forward(&tokens).unwrap();
        let (loss, gradients) = loss_and_gradients(model, &tokens, &targets);
        let values = [("logits".into(), logits), ("loss".into(), loss)];
        values.into_iter().chain(gradients).collect()
    })
}

/// Checks flash against naive attention. f64 agrees up to rounding. In f32 the error against f64 is at most twice
/// naive's (gradients: three times), plus a floor for the case that naive's error is 0.
fn agree(head_dim: usize, length: usize, policy: KernelPolicy) {
    let run = |attention, dtype| everything(&twin(attention, head_dim, dtype), length, policy);
    let exact = run(Algorithm::Naive, DType::F64);
    let wide = run(Algorithm::Flash, DType::F64);
    let narrow = Algorithm::ALL.map(|attention| run(attention, DType::F32));
    let [naive, flash] = &narrow;
    assert_eq!(exact.len(), 2 + 2 * 9 + 3);
    for (i, (name, exact)) in exact.iter().enumerate() {
        let size: f64 = elements(exact).iter().map(|g| g.abs()).sum();
        if length == 1 && size < 1e-12 {
            continue; // gradients of q and k, which are 0 with one key
        }
        close(name, &wide[i].1, exact, 1e-12);
        let [naive, flash] = [naive, flash].map(|run| distance(&run[i].1, exact));
        let factor = if i < 2 { 2.0 } else { 3.0 };
        let bound = factor * naive + 16.0 * f64::from(f32::EPSILON);
        assert!(
            flash <= bound,
            "{name}: flash {flash:.2e}, naive {naive:.2e}"
        );
    }
}

#[rstest]
fn flash_and_naive_models_agree(
    #[values(6, 32, 80)] head_dim: usize,
    #[values(1, 2, 13, 64, 123, 257)] length: usize,
) {
    agree(head_dim, length, KernelPolicy::Strict);
}

#[rstest]
fn flash_and_naive_references_agree(#[values(1, 13, 123)] length: usize) {
    agree(6, length, KernelPolicy::Reference);
}

/// `loss`, which training calls, agrees too.
#[test]
fn losses_of_one_op_agree() {
    let [naive, flash] = Algorithm::ALL.map(|attention| {
        let model = twin(attention, 6, DType::F64);
        let (tokens, targets) = (ids(29, 2, 123), ids(29, 2, 123));
        let loss = model.loss(&tokens, &targets).unwrap();
        alive(&gradients_of(&loss, model.parameters()));
        loss
    });
    close("loss", &flash, &naive, 1e-13);
}

/// The two algorithms differ in their bits; otherwise these tests would compare naive attention with itself.
#[test]
fn they_are_two_algorithms() {
    let [naive, flash] = Algorithm::ALL.map(|attention| {
        let model = twin(attention, 32, DType::F32);
        bits(&model.forward(&ids(29, 2, 257)).unwrap())
    });
    assert!(naive != flash, "the same bits");
}

#[test]
fn both_write_the_same_text() {
    let config = GenerateConfig {
        max_new_tokens: 40,
        seed: 3,
        ..Default::default()
    };
    let greedy = GenerateConfig {
        temperature: 0.0,
        ..config.clone()
    };
    for config in [config, greedy] {
        let [naive, flash] = Algorithm::ALL.map(|attention| {
            let model = attending(attention, &mini(), 2, DType::F64);
            model.generate(&[3, 14, 15], &config).unwrap()
        });
        assert_eq!(naive, flash);
        assert_eq!(naive.len(), 40);
    }
}

/// A seed or a file gives both algorithms the same weights, and a file does not record which one wrote it.
#[test]
fn weights_do_not_depend_on_it() {
    let folder = tempdir().unwrap();
    let [naive, flash] = Algorithm::ALL.map(|attention| {
        let model = attending(attention, &mini(), 4, DType::F32);
        assert_eq!(model.attention(), attention);
        let path = folder.path().join(attention.name());
        model.save(&path).unwrap();
        (model, path)
    });
    assert_eq!(all_bits(&naive.0), all_bits(&flash.0));
    let [one, other] = [&naive, &flash].map(|(_, path)| safetensors::load(path, &CPU).unwrap());
    assert_eq!(one.len(), other.len());
    for (name, weight) in &one {
        assert_eq!(bits(weight), bits(&other[name]), "{name}");
    }
    let read = TransformerLM::load(&mini(), &naive.1, &CPU).unwrap();
    assert_eq!(read.attention(), Algorithm::Naive);
    let read = read.with_attention(Algorithm::Flash).unwrap();
    let tokens = ids(29, 2, 13);
    let logits = |model: &TransformerLM| bits(&model.forward(&tokens).unwrap());
    assert_eq!(logits(&read), logits(&flash.0));
}

/// A layer built directly meets the limit in its forward, and the error names the algorithm that accepts such heads.
#[test]
fn heads_that_flash_attention_does_not_take() {
    let width = 258;
    let x = numbers(&[1, 3, width], DType::F32, 1);
    let parts = ["attention::flash", "at most 256", "258", "naive"];
    let layer = Attention::new(&causal(width, 1), None, seeded(DType::F32)).unwrap();
    layer.forward(&x).unwrap();
    let layer = layer.with_attention(Algorithm::Flash);
    refusal(layer.forward(&x), &parts);
    layer.with_attention(Algorithm::Naive).forward(&x).unwrap();
    let block = TransformerBlock::new(width, 1, 5, 1e-5, None, seeded(DType::F32)).unwrap();
    block.forward(&x).unwrap();
    refusal(block.with_attention(Algorithm::Flash).forward(&x), &parts);
}
