//! Plans as data: costs, disjoint buffers, and their reports.

use super::{CPU, batch, config, model_and_optimizer, plan_of};
use crate::settings::{in_precision, meta_of};
use candle_core::DType;
use rstest::rstest;
use tallow::Error;
use tallow::attention::Algorithm;
use tallow::bench::EndToEnd;
use tallow::compile::{Batch, Step, StepConfig, Target};
use tallow::internals::{BufferRange, Call, Named, Op};
use tallow::memory::Mode;
use tallow::model::{TransformerConfig, TransformerLM, flops};
use tallow::nn::{Architecture, Checkpointing};
use tallow::precision::Precision;
use tallow::probe::Kind;
use tallow::profile::Profiler;

/// On a GPU a chunk has 4,096 x 10,240 logits, but in half precision 2,048 rows or more: 8,192 rows are 10 chunks of
/// 896, or 4 of 2,048. On the CPU it has 256 x 10,240 logits, but half as many rows as the width or more, from 128 to
/// 256.
#[rstest]
#[case(Target::Cuda, Precision::F32, 64, 50_257, 10)]
#[case(Target::Cuda, Precision::BF16, 64, 50_257, 4)]
#[case(Target::Cuda, Precision::F16, 64, 50_257, 4)]
#[case(Target::Cuda, Precision::BF16, 64, 10_000, 2)]
#[case(Target::Cpu, Precision::F32, 64, 50_257, 64)]
#[case(Target::Cpu, Precision::BF16, 384, 50_257, 43)]
#[case(Target::Cpu, Precision::F32, 512, 50_257, 32)]
#[case(Target::Cpu, Precision::F32, 64, 5_000, 16)]
fn the_head_takes_rows_in_chunks(
    #[case] target: Target,
    #[case] precision: Precision,
    #[case] width: usize,
    #[case] vocab_size: usize,
    #[case] chunks: usize,
) {
    let model = TransformerConfig {
        vocab_size,
        context_length: 1024,
        ..config(1, 2, width / 2, 72)
    };
    let model = meta_of(&model, Algorithm::Flash);
    let batch = Batch::meta(8, 1024).unwrap();
    let (plan, _) = Step::plan_for_model(target, &model, &in_precision(precision), batch).unwrap();
    let calls = plan.calls().iter();
    let losses = calls.filter(|call| call.op.name() == "cross_entropy");
    assert_eq!(losses.count(), chunks);
}

/// No two buffers of a plan that are live at the same call share a byte.
#[rstest]
fn live_buffers_never_meet(
    #[values("tiny", "small", "medium", "2.7b")] name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Checkpointing::None, Checkpointing::Sqrt)] checkpointing: Checkpointing,
    #[values(1, 3)] accumulation: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let preset = TransformerConfig::preset(name).unwrap();
    let model = meta_of(&preset, attention).with_checkpointing(checkpointing);
    let plan = StepConfig {
        accumulation,
        clip_norm: Some(1.0),
        precision,
        ..Default::default()
    };
    let (plan, _) = plan_of(&model, &plan, [4, 256]).unwrap();
    let placed: Vec<_> = plan.buffers().iter().filter(|b| b.is_in_arena()).collect();
    let mut end = 0;
    for (i, a) in placed.iter().enumerate() {
        let range = a.arena_range().unwrap();
        end = end.max(range.end);
        for b in &placed[..i] {
            let other = b.arena_range().unwrap();
            let apart = range.end <= other.start || other.end <= range.start;
            let in_turn = a.live.end <= b.live.start || b.live.end <= a.live.start;
            assert!(apart || in_turn, "{a:?} and {b:?}");
        }
    }
    assert!(end <= plan.arena_bytes() && plan.arena_bytes() < end + 256);
    // A buffer is live in every call that touches it.
    for (index, call) in plan.calls().iter().enumerate() {
        for operand in call.operands() {
            assert!(plan.buffer(operand.buffer).unwrap().live.contains(&index));
        }
    }
    // A buffer that outlives a micro-batch is not overwritten by the next one.
    let per_micro_batch = plan.per_micro_batch();
    for buffer in plan.buffers() {
        if accumulation > 1 && buffer.is_in_arena() && buffer.live.end > per_micro_batch.end {
            let whole = buffer.live.start <= per_micro_batch.start
                || buffer.live.start >= per_micro_batch.end;
            assert!(whole, "{buffer:?}");
        }
        // A buffer written before the first micro-batch is live until the last one.
        let before =
            buffer.live.start < per_micro_batch.start && buffer.live.end > per_micro_batch.start;
        assert!(
            !before || buffer.live.end >= per_micro_batch.end,
            "{buffer:?}"
        );
    }
}

/// The FLOPs of the calls are the model's; recomputation adds more.
#[rstest]
fn flops_are_the_models(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let model = TransformerConfig::preset("small").unwrap();
    let wanted = flops::forward_backward(&model, 8, 100).total();
    let plan = |checkpointing| {
        let model = meta_of(&model, attention).with_checkpointing(checkpointing);
        // Enough sequences that activations, not gradients, determine the peak.
        let (plan, _) = plan_of(&model, &StepConfig::default(), [8, 100]).unwrap();
        plan
    };
    assert_eq!(plan(Checkpointing::None).flops(), wanted);
    let again = plan(Checkpointing::Block);
    let forward = flops::forward(&model, 8, 100);
    let blocks = forward.total() - forward.head;
    assert!(again.flops() > wanted && again.flops() < wanted + blocks);
    assert!(again.arena_bytes() < plan(Checkpointing::None).arena_bytes());
}

#[test]
fn explain_says_what_is_done_and_where() {
    let model = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let plan = StepConfig {
        clip_norm: Some(1.0),
        accumulation: 2,
        ..Default::default()
    };
    let (plan, _) = plan_of(&model, &plan, [2, 37]).unwrap();
    let text = plan.explain();
    for wanted in [
        "layers.1/attn/q_proj",
        "add_rms_norm",
        "rows 74, cols 48, depth 48, b_transposed", // x W^T
        "rows 48, cols 48, depth 74, a_transposed, c += from the second micro-batch", // dy^T x
        "clip_factor",
        "run 2 times a step",
        &format!("({} bytes)", plan.arena_bytes()),
    ] {
        assert!(text.contains(wanted), "no {wanted:?} in\n{text}");
    }
    assert_eq!(
        text.matches(" adamw ").count(),
        plan.calls().iter().filter(|c| c.path == "adamw").count() * 2
    );
}

/// A profile contains every call, with its path in the model and its costs.
#[test]
fn profiles_see_every_call() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(2, 2, 24, 56), Algorithm::Naive));
    let plan = StepConfig {
        clip_norm: Some(1.0),
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let (tokens, targets) = batch(97, 4, 20, 0);
    step.prepare((&tokens, &targets)).unwrap();
    let profiler = Profiler::start_on_this_thread().unwrap();
    step.run(&mut optimizer, (&tokens, &targets)).unwrap();
    let recording = profiler.finish().unwrap();
    let ops: Vec<_> = recording
        .spans
        .iter()
        .filter(|s| s.kind == Kind::Op)
        .collect();
    let plan = step.plan().unwrap();
    let calls = plan.calls();
    assert_eq!(ops.len(), calls.len());
    for (span, call) in ops.iter().zip(calls) {
        let wanted = format!("{}/{}", call.path, call.op.name());
        assert_eq!(span.path.to_string(), wanted);
    }
    let costs: Vec<_> = ops.iter().map(|span| span.cost().unwrap()).collect();
    let products: f64 = costs.iter().map(|cost| cost.matmul_flops).sum();
    assert_eq!(products, plan.flops());
    let others = |is_in: fn(&Call) -> bool| {
        let calls = costs.iter().zip(calls).filter(|(_, call)| is_in(call));
        calls.map(|(cost, _)| cost.other_flops).sum::<f64>()
    };
    let of_parts = others(|call| call.cost_index.is_some());
    assert!((of_parts / plan.other_flops() - 1.0).abs() < 1e-12);
    let of_updates = others(|call| matches!(call.op, Op::Update { .. }));
    assert_eq!(of_updates, 14.0 * model.config().num_parameters() as f64);
    let phases = ["forward", "backward", "optimizer"];
    for phase in phases {
        assert!(ops.iter().any(|span| span.phase == phase), "{phase}");
    }
}

/// One rectangle for each buffer, in addition to those of the legend.
#[test]
fn the_memory_map_shows_every_buffer() {
    let model = meta_of(&config(2, 2, 24, 56), Algorithm::Flash);
    let (plan, _) = plan_of(&model, &StepConfig::default(), [4, 100]).unwrap();
    let svg = plan.memory_map();
    let buffers = plan.buffers().iter().filter(|b| b.is_in_arena());
    assert_eq!(svg.matches("<title>").count(), buffers.count());
    for wanted in [
        "layers.1/attn/q_proj/linear",
        "gradient of lm_head.weight",
        "backward",
        "</svg>",
    ] {
        assert!(svg.contains(wanted), "{wanted}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map.svg");
    plan.save_memory_map(&path).unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), svg);
}

/// No plan needs less than the estimated lower bound, and that of a model of typical size needs less than three times
/// as much.
#[rstest]
fn no_plan_takes_less_than_the_lower_bound(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values("none", "block", "every-2", "sqrt")] checkpointing: &str,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let checkpointing: Checkpointing = checkpointing.parse().unwrap();
    for (layers, d_model, d_ff, vocab_size) in [(1, 8, 4, 3), (5, 32, 8, 700), (3, 64, 200, 50)] {
        for (sizes, context_length, architecture) in [
            ([1, 1], 1, Architecture::Llama),
            ([2, 33], 64, Architecture::Llama),
            ([7, 80], 80, Architecture::Llama),
            ([1, 1], 1, Architecture::Gpt2),
            ([2, 33], 64, Architecture::Gpt2),
        ] {
            for (budget, optimizer_in_backward) in [(None, false), (None, true), (Some(0.7), false)]
            {
                let model = TransformerConfig {
                    vocab_size,
                    context_length,
                    d_model,
                    num_layers: layers,
                    num_heads: 4,
                    d_ff,
                    architecture,
                    ..Default::default()
                };
                let unlimited = StepConfig {
                    optimizer_in_backward,
                    precision,
                    ..Default::default()
                };
                let meta = meta_of(&model, attention).with_checkpointing(checkpointing);
                let whole = plan_of(&meta, &unlimited, sizes).unwrap().0;
                let budget = budget.map(|part| (whole.arena_bytes() as f64 * part) as u64);
                let config = StepConfig {
                    memory_budget_bytes: budget,
                    ..unlimited
                };
                let least =
                    Step::memory_lower_bound(&model, attention, checkpointing, &config, sizes);
                let least = least.unwrap();
                if let Ok((plan, _)) = plan_of(&meta, &config, sizes) {
                    assert!(least <= plan.total_bytes(), "{least} {model:?} {config:?}");
                }
                let forward = EndToEnd {
                    config: model.clone(),
                    attention,
                    checkpointing,
                    batch_size: sizes[0],
                    sequence_length: sizes[1],
                    step: precision.into(),
                    ..crate::bench::run(Mode::Forward)
                };
                let (plan, _) = forward.plan(&CPU).unwrap();
                let none = EndToEnd {
                    available_bytes: Some(0),
                    ..forward
                };
                let Err(Error::OutOfMemory { wanted_bytes, .. }) = none.plan(&CPU) else {
                    panic!("planned in no memory");
                };
                let total = plan.total_bytes();
                assert!(wanted_bytes <= total, "{wanted_bytes} {model:?} {sizes:?}");
            }
        }
    }
    let (model, config) = (TransformerConfig::default(), in_precision(precision));
    let (none, sizes) = (Checkpointing::None, [16, 256]);
    let least = Step::memory_lower_bound(&model, attention, none, &config, sizes).unwrap();
    let (plan, _) = plan_of(&meta_of(&model, attention), &config, sizes).unwrap();
    assert!(
        3 * least > plan.total_bytes(),
        "{least} {}",
        plan.total_bytes()
    );
}

/// Ids, numbers, calls and names that a plan does not have return `None`.
#[test]
fn what_a_plan_does_not_have_is_none() {
    let of_layers = |num_layers| {
        let model = TransformerConfig {
            num_layers,
            ..Default::default()
        };
        let meta = TransformerLM::meta(&model).unwrap();
        let (plan, _) = plan_of(&meta, &StepConfig::default(), [4, 256]).unwrap();
        plan
    };
    let (small, large) = (of_layers(1), of_layers(3));
    let is_beyond = |call: &&Call| {
        let mut operands = call.operands();
        operands.any(|operand| operand.buffer.index() >= small.buffers().len())
    };
    let foreign = large.calls().iter().find(is_beyond).unwrap();
    let id = foreign.operands().map(|operand| operand.buffer).max();
    assert_eq!(small.buffer(id.unwrap()), None);
    assert!(large.buffer(id.unwrap()).is_some());
    assert_eq!(small.table(999), None);
    assert_eq!(small.runs_per_step(usize::MAX), 0);

    let own = &small.calls()[0];
    let mut of_no_part = own.clone();
    of_no_part.cost_index = Some(999);
    let mut too_long = own.clone();
    let everything = BufferRange {
        buffer: own.operands().next().unwrap().buffer,
        elements: 0..usize::MAX,
    };
    too_long.reads = Named::from([("x", everything)]);
    for call in [foreign, &of_no_part, &too_long] {
        assert_eq!(small.bytes_moved(call), None, "{call:?}");
        assert_eq!(small.compute_dtype(call), None, "{call:?}");
        assert_eq!(small.cost(call), None, "{call:?}");
    }
    for call in small.calls() {
        assert!(small.bytes_moved(call) > Some(0), "{call:?}");
        assert_eq!(small.compute_dtype(call), Some(DType::F32), "{call:?}");
        assert!(small.cost(call).is_some(), "{call:?}");
    }
    assert_eq!(own.reads.get("nope"), None);
}
