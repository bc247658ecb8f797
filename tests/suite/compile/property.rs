//! Random small configurations: planned steps equal eager ones.

use super::{agree, config};
use crate::settings::meta_of;
use proptest::prelude::*;
use std::num::NonZeroUsize;
use tallow::attention::Algorithm;
use tallow::compile::StepConfig;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 50, ..Default::default() })]

    #[test]
    fn planned_is_eager(
        (layers, heads, half_head, d_ff) in (1usize..4, 1usize..4, 1usize..16, 1usize..70),
        (batch_size, length, accumulation) in (1usize..4, 1usize..90, 1usize..4),
        (clips, clip_value, flash, segment) in
            (any::<bool>(), prop::option::of(1e-4..1e-1), any::<bool>(), 0usize..4),
        in_backward in any::<bool>(),
        precision in prop::sample::select(vec![Precision::F32, Precision::BF16]),
    ) {
        let attention = if flash { Algorithm::Flash } else { Algorithm::Naive };
        let checkpointing = NonZeroUsize::new(segment).map_or(Checkpointing::None, Checkpointing::Every);
        let in_backward = in_backward && !clips && accumulation == 1;
        let plan = StepConfig {
            accumulation,
            clip_norm: clips.then_some(0.7),
            clip_value,
            optimizer_in_backward: in_backward,
            precision,
            ..Default::default()
        };
        let model = meta_of(&config(layers, heads, 2 * half_head, d_ff), attention)
        .with_checkpointing(checkpointing);
        agree(&model, &plan, [batch_size, length]);
    }
}
