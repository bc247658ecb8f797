//! `tallow::train`: learning, equality of resumed runs, and every error.

mod damaged;
mod eager_loop;
mod learning;
mod loss_scaling;
pub mod masked;
mod precision_equality;
mod refusals;
mod resuming;
mod saving;
mod scale_saved;
mod signals;
mod steps;
mod writers;

use crate::check::{self, refusal};
use std::path::{Path, PathBuf};

use tallow::attention::Algorithm;
use tallow::data::Tokens;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::Checkpointing;
use tallow::optim::Schedule;
use tallow::train::{StepReport, TrainConfig, Trainer};
use tallow::{Error, Result};
use tempfile::{TempDir, tempdir};

const VOCAB: usize = 11;

/// Returns a model of odd sizes, small enough for many runs.
fn sizes() -> TransformerConfig {
    TransformerConfig {
        vocab_size: VOCAB,
        context_length: 13,
        d_model: 20,
        num_layers: 2,
        num_heads: 2,
        d_ff: 28,
        ..Default::default()
    }
}

fn settings() -> TrainConfig {
    TrainConfig {
        batch_size: 3,
        sequence_length: 11,
        steps: 12,
        schedule: Schedule::WarmupCosine {
            max_lr: 1e-2,
            min_lr: 1e-3,
            warmup_steps: 3,
            total_steps: 12,
        },
        attention: Some(Algorithm::Naive),
        checkpointing: Some(Checkpointing::None),
        evaluate_every: 5,
        seed: 7,
        ..Default::default()
    }
}

/// Returns `len` ids that look random, and differ with `salt`.
fn noise(len: u32, salt: u32) -> Tokens {
    let ids: Vec<u32> = (0..len)
        .map(|i| ((i + salt).wrapping_mul(2_654_435_761) >> 9) % VOCAB as u32)
        .collect();
    Tokens::from_ids(ids, VOCAB).unwrap()
}

fn training() -> Tokens {
    noise(300, 0)
}

fn validation() -> Tokens {
    noise(80, 1000)
}

fn model() -> TransformerLM {
    TransformerLM::new(&sizes(), 5, &candle_core::Device::Cpu).unwrap()
}

fn start(config: TrainConfig) -> Trainer {
    Trainer::new(model(), config, training(), validation()).unwrap()
}

fn resume(path: &Path, config: TrainConfig) -> Result<Trainer> {
    let device = candle_core::Device::Cpu;
    Trainer::resume(path, &sizes(), config, training(), validation(), &device)
}

fn take(trainer: &mut Trainer, count: usize) -> Vec<StepReport> {
    let steps = std::iter::from_fn(|| trainer.step().unwrap());
    steps.take(count).collect()
}

/// Returns the bits of every weight and every entry of the optimizer's state.
fn bits(trainer: &Trainer) -> Vec<(String, Vec<u64>)> {
    let weights = trainer.model().parameters().into_iter();
    let weights = weights.map(|(name, var)| (name, var.as_tensor().clone()));
    let all = weights.chain(trainer.optimizer().state());
    all.map(|(name, tensor)| (name, check::bits(&tensor)))
        .collect()
}

/// Returns a temporary folder, and a path in it.
fn checkpoint() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    (folder, path)
}
