//! Planned steps of GPT-2 and Gemma 2 against eager ones.

use super::{agree, config, updating};
use crate::settings::meta_of;
use rstest::rstest;
use std::num::NonZeroUsize;
use tallow::attention::Algorithm;
use tallow::model::TransformerConfig;
use tallow::nn::{Architecture, Checkpointing};
use tallow::ops::RotaryPairs;
use tallow::precision::Precision;

/// Sequences shorter than the context, where the unused positions have gradients of 0, and of full length.
#[rstest]
fn gpt2(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values((1, false), (3, false), (1, true))] (accumulation, optimizer_in_backward): (
        usize,
        bool,
    ),
    #[values((false, 33, Checkpointing::None), (true, 160, Checkpointing::Block))]
    (tie_embeddings, length, checkpointing): (bool, usize, Checkpointing),
) {
    let plan = updating(precision, accumulation, optimizer_in_backward);
    let model = meta_of(
        &TransformerConfig {
            architecture: Architecture::Gpt2,
            tie_embeddings,
            ..config(2, 2, 24, 56)
        },
        attention,
    )
    .with_checkpointing(checkpointing);
    agree(&model, &plan, [2, length]);
}

/// Returns a Gemma 2 configuration: grouped heads, a window in the first of two blocks, soft caps that are reached.
pub fn of_gemma(base: TransformerConfig) -> TransformerConfig {
    TransformerConfig {
        architecture: Architecture::Gemma2,
        num_kv_heads: Some(base.num_heads / 2),
        rope_pairs: RotaryPairs::Halves,
        tie_embeddings: true,
        sliding_window: NonZeroUsize::new(20),
        attention_scale: Some(0.3),
        attention_soft_cap: Some(1.5),
        logit_soft_cap: Some(2.0),
        ..base
    }
}

#[rstest]
fn gemma2(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values((1, Checkpointing::None), (3, Checkpointing::Block))] (accumulation, checkpointing): (
        usize,
        Checkpointing,
    ),
) {
    let plan = updating(precision, accumulation, false);
    let model = meta_of(&of_gemma(config(2, 2, 24, 56)), attention);
    let model = model.with_checkpointing(checkpointing);
    agree(&model, &plan, [2, 33]);
}
