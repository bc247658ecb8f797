//! Fifty configurations that the estimate is held against, by a rule.

use tallow::attention::Algorithm;
use tallow::memory::{Kernels, Mode, Workload};
use tallow::model::TransformerConfig;
use tallow::precision::{Precision, Regime};

/// How many there are.
pub const COUNT: usize = 50;

/// D, F, H, L, V: narrow and wide, shallow and deep; vocabularies, weights or attention that outweigh the rest; widths
/// that are no multiple of a register, and widths of whole pages.
const MODELS: [[usize; 5]; 11] = [
    [128, 352, 4, 3, 1000],
    [64, 256, 4, 2, 8000],
    [256, 700, 4, 4, 500],
    [96, 200, 3, 9, 700],
    [192, 512, 12, 6, 2000],
    [320, 864, 5, 2, 5000],
    [384, 1024, 6, 3, 3000],
    [64, 128, 16, 5, 300],
    [768, 3072, 12, 1, 1000],
    [512, 1344, 16, 4, 10_000],
    [200, 2048, 10, 7, 257],
];

/// B and T.
const BATCHES: [(usize, usize); 13] = [
    (4, 128),
    (1, 512),
    (16, 64),
    (2, 257),
    (8, 128),
    (1, 1024),
    (32, 33),
    (4, 256),
    (3, 100),
    (6, 37),
    (1, 1500),
    (2, 384),
    (1, 123),
];

/// f32 twice.
const PRECISIONS: [Precision; 7] = [
    Precision::F32,
    Precision::BF16,
    Precision::F32,
    Precision::F16,
    Precision::F16.with_regime(Regime::Full),
    Precision::BF16.with_regime(Regime::Full),
    Precision::BF16.with_dropped_casts(true),
];

const CHECKPOINTING: [&str; 5] = ["none", "block", "every-2", "every-3", "sqrt"];

const MODES: [Mode; 3] = [Mode::TrainStep, Mode::ForwardBackward, Mode::Forward];

/// Case i takes element i of every list, each list beginning again where it ends. The lists' lengths, 2, 3, 5, 7, 11
/// and 13, have no common factor, so no two cases are alike, and every pair of one list's elements meets another's.
pub fn case(i: usize) -> (TransformerConfig, Workload) {
    let [d_model, d_ff, num_heads, num_layers, vocab_size] = MODELS[i % MODELS.len()];
    let (batch_size, sequence_length) = BATCHES[i % BATCHES.len()];
    let config = TransformerConfig {
        vocab_size,
        context_length: sequence_length,
        d_model,
        num_layers,
        num_heads,
        d_ff,
        ..Default::default()
    };
    let workload = Workload {
        batch_size,
        sequence_length,
        mode: MODES[i % MODES.len()],
        attention: Algorithm::ALL[i % Algorithm::ALL.len()],
        precision: PRECISIONS[i % PRECISIONS.len()],
        checkpointing: CHECKPOINTING[i % CHECKPOINTING.len()]
            .parse()
            .unwrap_or_default(),
        kernels: Kernels::Cpu,
        ..Default::default()
    };
    (config, workload)
}

/// A MiB.
const MIB: f64 = 1048576.0;

/// Whether a prediction is further from the measurement than 2% or 1 MiB, whichever is more, or more than 2% below it.
pub fn is_outside(predicted_bytes: u64, measured_bytes: u64) -> bool {
    let difference = predicted_bytes as f64 - measured_bytes as f64;
    let two_percent = 0.02 * measured_bytes as f64;
    difference > two_percent.max(MIB) || difference < -two_percent
}
