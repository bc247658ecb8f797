//! Planned memory against allocated memory.

use crate::child;
use crate::compile::{batch, plan_of};
use candle_core::Device;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::internals::Category;
use tallow::internals::gemm;
use tallow::memory::tracker;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;

#[test]
fn the_arena_is_what_the_plan_says() {
    if child::ran("compile::memory::the_arena_is_what_the_plan_says") {
        return;
    }
    let alive = || tracker::current_bytes().expect("the suite's allocator counts");
    let without_scratch = alive();
    gemm::reserve_scratch(true).unwrap(); // belongs to the process
    let reserved = alive() - without_scratch;
    let attentions = [Algorithm::Naive, Algorithm::Flash];
    let precisions = [Precision::F32, Precision::BF16, Precision::F16];
    let both = |attention| precisions.map(|precision| (attention, precision));
    for (attention, precision) in attentions.into_iter().flat_map(both) {
        let config = TransformerConfig {
            vocab_size: 2_500, // the head's matmuls would dominate the time
            num_layers: 1,
            ..Default::default()
        };
        let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
        let model = model.with_attention(attention).unwrap();
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
        let plan = StepConfig {
            clip_norm: Some(1.0),
            precision,
            loss_scaling: precision == Precision::F16,
            ..Default::default()
        };
        tracker::reset_peak();
        let before = alive();
        let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
        let plan = step.prepare(Batch::meta(8, 256).unwrap()).unwrap();
        let (arena_bytes, scratch_bytes) = (plan.arena_bytes(), plan.scratch_bytes());
        // The rest of a step: calls, buffers, tables. The planner's own memory is freed.
        let beside = alive() - before - arena_bytes;
        assert!(beside < 1 << 20, "{beside} bytes beside {arena_bytes}");

        let (tokens, targets) = batch(config.vocab_size, 8, 256, 0);
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let settled = alive();
        tracker::reset_peak();
        for _ in 0..2 {
            step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        }
        // No memory stays allocated, and no temporary has the size of a tensor: the smallest activation is (N, D), 4
        // MiB. The temporaries are ids and the packed operands of small matmuls.
        assert!(alive() <= settled + 4096, "{} more", alive() - settled);
        let transient = tracker::peak_bytes().unwrap() - settled;
        assert!(transient < 1 << 20, "{transient} bytes came and went");
        if precision != Precision::F32 {
            let needed = reserved + transient;
            assert!(
                needed <= scratch_bytes + (1 << 20),
                "{needed}, not {scratch_bytes}"
            );
        }
        drop(step);
        assert!(alive() <= settled - arena_bytes);
    }
}

/// The categories are exact: parameters, two moments and gradients, one value per parameter each.
#[test]
fn categories_add_up() {
    let config = TransformerConfig::default();
    let parameters = 4 * config.num_parameters() as u64;
    let meta = TransformerLM::meta(&config).unwrap();
    let (plan, _) = plan_of(&meta, &StepConfig::default(), [4, 256]).unwrap();
    assert_eq!(plan.category_bytes(Category::Parameter), parameters);
    assert_eq!(
        plan.category_bytes(Category::OptimizerState),
        2 * parameters
    );
    assert_eq!(plan.category_bytes(Category::Gradient), parameters);
    assert_eq!(plan.category_bytes(Category::Output), 0);
    let inputs = plan.category_bytes(Category::Input);
    assert_eq!(
        plan.total_bytes(),
        plan.arena_bytes() + 3 * parameters + inputs
    );
    // The logits of the whole batch would be 39 MiB and never exist together.
    let logits = plan.buffers().iter().filter(|b| b.name.ends_with("logits"));
    assert!(logits.map(|b| b.bytes()).max().unwrap() <= 12 << 20);
    // The arena's layout wastes little.
    assert!(plan.arena_bytes() as f64 <= 1.05 * plan.max_live_bytes() as f64);
}
