//! `tallow::model`, `tallow::nn` and `tallow::device`: results, guarantees and errors of the model and of each layer.

mod attention_choice;
mod attention_layers;
mod autocast;
mod config;
mod depth;
mod device;
mod documents;
mod files;
mod forward;
mod generate;
mod gpt2;
mod gradients;
mod init;
mod layer_files;
mod layers;
mod padding;
mod parameter;
mod parameters;
mod refused_files;
mod refused_inputs;
mod varmap;
mod weights;

use crate::check::{self, bits, distance, elements, refusal};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use tallow::attention::Algorithm;
use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
use tallow::{Error, nn, ops};

const CPU: Device = Device::Cpu;

/// Returns a fast model of odd sizes.
fn mini() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 29,
        context_length: 16,
        d_model: 18,
        num_layers: 2,
        num_heads: 3,
        d_ff: 25,
        ..Default::default()
    }
}

fn mini_model(seed: u64) -> TransformerLM {
    TransformerLM::new(&mini(), seed, &CPU).unwrap()
}

/// Returns the seeded model in a dtype.
fn model_of(config: &TransformerConfig, seed: u64, dtype: DType) -> TransformerLM {
    TransformerLM::from_var_builder(config, nn::seeded(seed, dtype, &CPU)).unwrap()
}

/// Returns the seeded model in a dtype, with this attention.
fn attending(
    attention: Algorithm,
    config: &TransformerConfig,
    seed: u64,
    dtype: DType,
) -> TransformerLM {
    let model = model_of(config, seed, dtype);
    model.with_attention(attention).unwrap()
}

/// Returns a builder with seed 5 for a single layer.
fn seeded(dtype: DType) -> VarBuilder<'static> {
    nn::seeded(5, dtype, &CPU)
}

/// Returns ids (B, T) below `vocab_size`, without a repeating pattern.
fn ids(vocab_size: usize, batch: usize, length: usize) -> Tensor {
    let draw = |i: u64| (i * 2_654_435_761 + 12_345) >> 7;
    let ids: Vec<u32> = (0..(batch * length) as u64)
        .map(|i| (draw(i) % vocab_size as u64) as u32)
        .collect();
    Tensor::from_vec(ids, (batch, length), &CPU).unwrap()
}

/// Returns numbers in [-1, 1) that differ with `salt`.
fn numbers(shape: &[usize], dtype: DType, salt: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n as u64)
        .map(|i| (((i + 1) * 7919 + salt * 104_729) as f64 * 0.618_033_988_75).fract() * 2.0 - 1.0)
        .collect();
    let numbers = Tensor::from_vec(values, shape, &CPU).unwrap();
    numbers.to_dtype(dtype).unwrap()
}

fn all_bits(model: &TransformerLM) -> Vec<(String, Vec<u64>)> {
    let parameters = model.parameters().into_iter();
    parameters.map(|(name, var)| (name, bits(&var))).collect()
}

fn close(what: &str, got: &Tensor, wanted: &Tensor, bound: f64) {
    let distance = distance(got, wanted);
    assert!(distance <= bound, "{what}: {distance:.2e}"); // fails for NaN
}

/// Returns the loss and the named gradient of every parameter; fails if one is missing.
fn loss_and_gradients(
    model: &TransformerLM,
    tokens: &Tensor,
    targets: &Tensor,
) -> (Tensor, Vec<(String, Tensor)>) {
    let logits = model.forward(tokens).unwrap();
    let loss = ops::cross_entropy(&logits, targets).unwrap();
    let gradients = gradients_of(&loss, model.parameters());
    (loss, gradients)
}

/// Returns the gradient of each parameter by backward from `loss`.
fn gradients_of(loss: &Tensor, parameters: Vec<(String, Var)>) -> Vec<(String, Tensor)> {
    check::gradients_of(parameters, &loss.backward().unwrap())
}

/// Checks that every gradient is finite and not all zero.
fn alive(gradients: &[(String, Tensor)]) {
    for (name, gradient) in gradients {
        let gradient = elements(gradient);
        assert!(gradient.iter().all(|g| g.is_finite()), "{name}");
        assert!(gradient.iter().any(|g| *g != 0.0), "{name} is all zeros");
    }
}
