//! Several ranks as threads of one process: collectives, and steps that equal those of one rank with all batches.
//! (Ranks that are processes are tested in `tests/distributed`; several GPUs in the example `distributed_benchmark`.)

mod answers;
mod collectives;
mod estimated_steps;
mod fully_sharded;
mod missing_gradients;
mod planned;
mod replicated;
mod sharded;
mod trainer;

use crate::check::{bits, distance};
use crate::settings::{meta_of, with_weights};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use tallow::attention::Algorithm;
use tallow::compile::StepConfig;
use tallow::distributed::{self, Communicator, Exchange};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::{Result, nn};

/// Runs `of_rank` on a thread for each rank, and returns the results by rank.
pub fn on_ranks<T: Send>(
    world_size: usize,
    of_rank: impl Fn(Communicator) -> Result<T> + Sync,
) -> Vec<T> {
    let ranks = distributed::threads(world_size).unwrap();
    let of_rank = &of_rank;
    std::thread::scope(|scope| {
        let threads = ranks.into_iter();
        let threads = threads.map(|communicator| scope.spawn(move || of_rank(communicator)));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.map(Result::unwrap).collect()
    })
}

/// Exchanges with buckets of one tensor, of some, and of all.
const EXCHANGES: [Exchange; 5] = [
    Exchange::PerParameter,
    Exchange::Flat,
    Exchange::Overlapped { bucket_bytes: 0 },
    Exchange::Overlapped { bucket_bytes: 3000 },
    Exchange::Overlapped {
        bucket_bytes: 1 << 40,
    },
];

fn config() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 37,
        context_length: 12,
        d_model: 16,
        num_layers: 2,
        num_heads: 2,
        d_ff: 24,
        ..Default::default()
    }
}

fn config_of_six_layers() -> TransformerConfig {
    TransformerConfig {
        num_layers: 6,
        ..config()
    }
}

/// Returns a meta model.
fn meta(config: &TransformerConfig) -> TransformerLM {
    meta_of(config, Algorithm::Flash)
}

fn model(seed: u64) -> TransformerLM {
    with_weights(&meta(&config()), nn::seeded(seed, DType::F32, &Device::Cpu))
}

fn plan_config(accumulation: usize, clip_norm: Option<f64>) -> StepConfig {
    StepConfig {
        clip_norm,
        accumulation,
        ..Default::default()
    }
}

/// Returns tokens and targets (1, 12) of batch number `index`.
fn batch(index: usize) -> [Tensor; 2] {
    let ids = (0..13u32).map(|i| (i * 31 + index as u32 * 17) * 13 % 37);
    let ids = Tensor::from_iter(ids, &Device::Cpu).unwrap();
    [0, 1].map(|first| {
        let part = ids.narrow(0, first, 12).unwrap();
        part.reshape((1, 12)).unwrap()
    })
}

/// Concatenates batches, as a plan with micro-batches expects them.
fn batches(numbers: std::ops::Range<usize>) -> [Tensor; 2] {
    let all: Vec<[Tensor; 2]> = numbers.map(batch).collect();
    [0, 1].map(|i| {
        let part: Vec<&Tensor> = all.iter().map(|pair| &pair[i]).collect();
        Tensor::cat(&part, 0).unwrap()
    })
}

/// Returns the gradients of a rank's loss, averaged over the ranks.
fn averaged(replicated: &distributed::Replicated, loss: Tensor) -> tallow::Result<GradStore> {
    let mut gradients = tallow::backward(loss)?;
    replicated.average(&mut gradients)?;
    Ok(gradients)
}
