//! What a rank of several takes: of one that has a part of each weight, predicted and measured.

use super::config;
use super::precisions::wrong_of;
use crate::child;
use candle_core::{DType, Device, Tensor};
use tallow::attention::Algorithm;
use tallow::dist::{Communicator, FullyShard, FullyShardConfig, Shard};
use tallow::memory::{Measured, Mode, Sharding, Workload, estimate, tracker};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Architecture, Checkpointing};
use tallow::optim::{AdamW, AdamWConfig};
use tallow::precision::Precision;
use tallow::{Result, backward};

const OWN: Shard = Shard {
    rank: 0,
    world_size: 1,
};

/// Alone in its process, since the counts are the process's. Of a job of one, whose part is all of each weight: it
/// gathers and exchanges as one of several does.
#[test]
fn a_fully_sharded_rank_takes_what_is_predicted() {
    if child::ran("memory::sharding::a_fully_sharded_rank_takes_what_is_predicted") {
        return;
    }
    let gpt2 = TransformerConfig {
        architecture: Architecture::Gpt2,
        ..config(128, 512, 4, 2000)
    };
    let tied = TransformerConfig {
        tie_embeddings: true, // gathered twice
        qkv_bias: true,
        num_kv_heads: Some(2),
        ..config(64, 160, 3, 4000)
    };
    let mut wrong = Vec::new();
    for (model, batch_size) in [
        (config(256, 700, 7, 500), 1), // weights dominate
        (config(64, 160, 5, 300), 8),  // activations do
        (config(64, 160, 2, 8000), 2), // embedding and head do
        (gpt2, 2),
        (tied, 2),
    ] {
        for precision in [Precision::F32, Precision::BF16] {
            for exchanged in [None, Some(DType::BF16)] {
                for checkpointing in [Checkpointing::None, Checkpointing::Block] {
                    let parts = FullyShardConfig {
                        dtype: exchanged,
                        ..Default::default()
                    };
                    let workload = Workload {
                        batch_size,
                        sequence_length: 64,
                        mode: Mode::TrainStep,
                        attention: Algorithm::Flash,
                        precision,
                        checkpointing,
                        sharding: Some(Sharding::Full(OWN, parts)),
                        ..Default::default()
                    };
                    let measured = measured(&model, &workload, parts).unwrap();
                    wrong.extend(wrong_of(&model, &workload, &measured));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The third step, as [`tallow::memory::measure`] counts one.
fn measured(
    config: &TransformerConfig,
    workload: &Workload,
    parts: FullyShardConfig,
) -> Result<Measured> {
    let config = TransformerConfig {
        attention: workload.attention,
        checkpointing: workload.checkpointing,
        ..config.clone()
    };
    let now = || tracker::current_bytes().unwrap();
    let sharded = FullyShard::new(&Communicator::alone(&Device::Cpu), parts)?;
    let weights = sharded.builder(nn::seeded(0, DType::F32, &Device::Cpu));
    let model = TransformerLM::from_var_builder(&config, weights)?;
    let mut optimizer = AdamW::new(sharded.parameters(), AdamWConfig::default())?;
    let shape = (workload.batch_size, workload.sequence_length);
    let tokens = Tensor::zeros(shape, DType::U32, &Device::Cpu)?;
    let targets = Tensor::zeros(shape, DType::U32, &Device::Cpu)?;
    let mut step = || {
        let loss = workload.precision.run(|| model.loss(&tokens, &targets))?;
        let after_forward = now();
        optimizer.step(&backward(loss)?)?;
        Ok::<_, tallow::Error>(after_forward)
    };
    for _ in 0..2 {
        step()?;
    }
    tracker::reset_peak();
    let start = now();
    let after_forward = step()?;
    let peak = tracker::peak_bytes().unwrap();
    // All that was there before the step, and goes now: room for what is gathered ahead came with the first.
    let with_all = now();
    drop((model, sharded, optimizer, tokens, targets));
    let ready = with_all - now();
    Ok(Measured {
        after_forward_bytes: ready + after_forward - start,
        peak_bytes: ready + peak - start,
    })
}

/// Workloads are saved and read with the dtype by its name.
#[test]
fn a_sharding_is_serialized() {
    let parts = FullyShardConfig {
        dtype: Some(DType::BF16),
        ..Default::default()
    };
    let whole = FullyShardConfig::default();
    for sharding in [
        Sharding::Optimizer(OWN),
        Sharding::Full(OWN, parts),
        Sharding::Full(OWN, whole),
    ] {
        let text = serde_json::to_string(&sharding).unwrap();
        assert_eq!(serde_json::from_str::<Sharding>(&text).unwrap(), sharding);
        let other = text.replace("bf16", "bf17");
        let error = serde_json::from_str::<Sharding>(&other);
        assert_eq!(error.is_err(), text != other, "{other}");
    }
}

/// Ranks have the parts that their job gives them.
#[test]
fn parts_are_what_is_predicted() {
    let model = config(64, 160, 2, 300);
    let of = |rank| {
        let own = Shard {
            rank,
            world_size: 3,
        };
        let workload = Workload {
            batch_size: 2,
            sequence_length: 64,
            sharding: Some(Sharding::Full(own, FullyShardConfig::default())),
            ..Default::default()
        };
        estimate(&model, &workload).unwrap()
    };
    let shapes = model.parameter_shapes();
    for (rank, plan) in [0, 1, 2].map(of).into_iter().enumerate() {
        let own = Shard {
            rank,
            world_size: 3,
        };
        let parts = shapes
            .iter()
            .map(|(_, shape)| own.part(shape.elem_count()).len());
        let bytes = 4 * parts.sum::<usize>() as u64;
        assert_eq!(
            [
                plan.parameter_bytes,
                plan.gradient_bytes,
                plan.optimizer_bytes
            ],
            [bytes, bytes, 2 * bytes]
        );
    }
    let text = of(0).to_string();
    assert!(text.contains("own parts"), "{text}");
    // Kept as a whole is what no product reads.
    assert!(text.contains("token_embeddings.weight"), "{text}");
    assert!(!text.contains("layers.ffn.w1.weight"), "{text}");
}
