//! Planned steps of GPT-2 beside eager ones.

use super::{agree, config};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::StepConfig;
use tallow::model::TransformerConfig;
use tallow::nn::{Architecture, Checkpointing};
use tallow::precision::Precision;

/// With fewer tokens than positions, of which the rest have gradients of 0, and with as many.
#[rstest]
fn steps(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values((1, false), (3, false), (1, true))] (accumulation, optimizer_in_backward): (
        usize,
        bool,
    ),
    #[values((false, 33, Checkpointing::None), (true, 160, Checkpointing::Block))]
    (tie_embeddings, length, checkpointing): (bool, usize, Checkpointing),
) {
    let plan = StepConfig {
        precision,
        accumulation,
        clip_norm: (!optimizer_in_backward).then_some(0.5),
        optimizer_in_backward,
        ..Default::default()
    };
    let model = TransformerConfig {
        architecture: Architecture::Gpt2,
        tie_embeddings,
        checkpointing,
        ..config(2, 2, 24, 56, attention)
    };
    agree(&model, &plan, [2, length]);
}
