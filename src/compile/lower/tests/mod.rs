//! Tests of plans for a GPU, which run without one.

#[cfg(feature = "report")]
mod costs;

use super::super::batch::{Batch, Inputs};
use super::super::buffer::Category;
use super::super::loss;
use super::super::op::Call;
use super::super::op::Op;
use super::super::plan::Plan;
use super::super::step::Step;
use super::super::traced::Planned;
use super::*;
use crate::attention::Algorithm;
use crate::model::{TransformerConfig, TransformerLM};
use crate::precision::Precision;
use candle_core::DType;

/// Returns a step's plan for micro-batches (B, T) with this recomputation.
fn planned(
    target: Target,
    model: &TransformerLM,
    [batch_size, length]: [usize; 2],
    config: &StepConfig,
    recompute: Recompute,
) -> Planned {
    let meta = loss::meta_model(model, length).unwrap();
    let job = loss::PlanRequest {
        op: "test",
        kind: PlanKind::TrainStep,
        target,
        weights: Some(&meta.parameters()),
        loss: &loss::Loss::Model(Box::new(meta)),
        config,
    };
    let batch = Batch::meta(batch_size * config.accumulation, length).unwrap();
    let inputs = Inputs::of("test", &batch, config.accumulation, false).unwrap();
    let function = job.trace(&inputs, model.checkpointing()).unwrap();
    let function = Rc::new(function);
    let kind = PlanKind::TrainStep;
    function.plan(kind, config, recompute).unwrap()
}

/// Returns a step's plan for B sequences of 1,024 tokens, with sums and gates of this number of blocks recomputed.
fn gpu_plan(
    model: &TransformerLM,
    batch_size: usize,
    config: &StepConfig,
    [sums, gates]: [usize; 2],
) -> Plan {
    let recompute = Recompute { sums, gates };
    let planned = planned(Target::Cuda, model, [batch_size, 1024], config, recompute);
    planned.lowered.plan
}

/// Returns a meta model with flash attention.
fn flash(config: &TransformerConfig) -> TransformerLM {
    let model = TransformerLM::meta(config).unwrap();
    model.with_attention(Algorithm::Flash).unwrap()
}

fn small(num_layers: usize) -> TransformerConfig {
    TransformerConfig {
        num_layers,
        context_length: 1024,
        ..TransformerConfig::preset("small").unwrap()
    }
}

fn in_bf16() -> StepConfig {
    StepConfig {
        precision: Precision::BF16,
        ..Default::default()
    }
}

/// A block saves exactly: in f32 the residual stream before each norm and rstd; in bf16 q, k and v, attention's output
/// with its rounding error, gate and up; and the log-sum-exp. It saves no norm's output. With sums recomputed it saves
/// the branch in bf16 instead of the stream before the second norm. With gates recomputed it saves neither gate nor up.
#[test]
fn what_a_block_leaves() {
    let config = in_bf16();
    let activations = |layers, sums, gates| {
        let plan = gpu_plan(&flash(&small(layers)), 2, &config, [sums, gates]);
        plan.category_bytes(Category::Activation)
    };
    let model = small(1);
    let [n, d, f, h] = [2 * 1024, model.d_model, model.d_ff, model.num_heads].map(|x| x as u64);
    let gate_up = 2 * n * 2 * f;
    let block = 4 * (2 * n * d + 2 * n) + 2 * (3 * n * d + 2 * n * d) + 4 * h * n + gate_up;
    assert_eq!(activations(5, 0, 0) - activations(4, 0, 0), block);
    assert_eq!(
        activations(5, 5, 0) - activations(4, 4, 0),
        block - 2 * n * d
    );
    assert_eq!(activations(5, 0, 0) - activations(5, 3, 0), 3 * 2 * n * d);
    assert_eq!(
        activations(5, 5, 5) - activations(4, 4, 4),
        block - 2 * n * d - gate_up
    );
    assert_eq!(activations(5, 5, 0) - activations(5, 5, 3), 3 * gate_up);
}

/// Sums are recomputed before gates, and only as many as the budget needs.
#[test]
fn a_budget_takes_the_cheapest_first() {
    let model = flash(&small(4));
    let config = StepConfig {
        optimizer_in_backward: true, // otherwise gradients reuse the activations' memory, and the peak is after them
        ..in_bf16()
    };
    let within = |budget_bytes: u64| {
        let config = StepConfig {
            memory_budget_bytes: Some(budget_bytes),
            ..config.clone()
        };
        let batch = Batch::meta(8, 1024).unwrap();
        Step::plan_for_model(Target::Cuda, &model, &config, batch)
            .unwrap()
            .0
    };
    let with = |recompute| gpu_plan(&model, 8, &config, recompute);
    let ladder = [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 1], [4, 2]].map(with);
    for pair in ladder.windows(2) {
        let bytes = pair[0].arena_bytes();
        assert!(within(bytes) == pair[0], "{bytes}");
        assert!(
            within(bytes - 1) == pair[1],
            "{bytes}, {}",
            pair[1].arena_bytes()
        );
    }
}

/// PyTorch's compiled step took 10,044 MiB there (one H200, bf16).
#[test]
fn small_in_seven_tenths_of_what_pytorch_takes() {
    let plan = gpu_plan(&flash(&small(12)), 16, &in_bf16(), [0, 0]);
    let mib = plan.total_bytes() as f64 / f64::from(1 << 20);
    assert!(mib <= 0.7 * 10_044.0, "{mib} MiB");
}

/// The workspace is cuBLASLt's, seven words of 8 bytes per parameter, one for each chunk of 8,192 elements, and a
/// forward's logits in bf16.
#[test]
fn what_lies_beside_the_arena() {
    let (model, config) = (small(1), in_bf16());
    let shapes = model.parameter_shapes();
    let words = shapes
        .iter()
        .map(|(_, shape)| 7 + shape.elem_count().div_ceil(8192));
    let tables_bytes = 8 * words.sum::<usize>() as u64;
    let meta = flash(&model);
    let plan = gpu_plan(&meta, 2, &config, [0, 0]);
    assert_eq!(plan.workspace_bytes(), (32 << 20) + tables_bytes);
    let beside: u64 = plan
        .buffers()
        .iter()
        .filter(|b| !b.is_in_arena())
        .map(|buffer| buffer.bytes())
        .sum();
    assert_eq!(
        plan.total_bytes(),
        plan.arena_bytes() + plan.workspace_bytes() + beside
    );
    let logits_bytes = 2 * 2 * 1024 * model.vocab_size as u64;
    let meta = loss::meta_model(&meta, 1024).unwrap();
    let tokens = graph::input("tokens", (2, 1024), DType::U32).unwrap();
    let (kind, batch) = (PlanKind::Forward, [("tokens", &tokens)]);
    let plan = Step::plan_for(Target::Cuda, kind, &in_bf16(), batch, |inputs| {
        meta.forward(&inputs.get("tokens")?)
    });
    let plan = plan.unwrap();
    assert_eq!(plan.workspace_bytes(), (32 << 20) + logits_bytes);
}

/// PyTorch's compiled step took 54.4 GiB there. For four fifths of that, sums are recomputed, and the gates of 9 of the
/// 48 blocks.
#[test]
fn xl_in_eight_tenths_of_what_pytorch_takes() {
    let model = TransformerConfig {
        context_length: 1024,
        ..TransformerConfig::preset("xl").unwrap()
    };
    let config = StepConfig {
        optimizer_in_backward: true,
        ..in_bf16()
    };
    let plan = gpu_plan(&flash(&model), 8, &config, [48, 9]);
    let gib = plan.total_bytes() as f64 / f64::from(1 << 30);
    assert!(gib <= 0.8 * 54.4, "{gib} GiB");
}

/// The head is updated when its gradient is complete, and a block's matrices consecutively after its backward. Their
/// bf16 gradients come directly from the matmuls, and only the update reads them. Vectors are updated at the end.
/// Gradients of two blocks are never alive together.
#[test]
fn gradients_that_pass() {
    let config = StepConfig {
        optimizer_in_backward: true,
        ..in_bf16()
    };
    let plan = gpu_plan(&flash(&small(3)), 1, &config, [0, 0]);
    let is_update = |call: &Call| matches!(call.op, Op::Update { .. });
    let mut rows = Vec::new();
    for row in plan.calls().chunk_by(|a, b| is_update(a) && is_update(b)) {
        let buffers = row.iter().filter(|call| is_update(call));
        let updated: Vec<_> = buffers
            .map(|call| {
                (
                    &plan.buffer_of(call.writes.operand("parameter")).name,
                    plan.buffer_of(call.reads.operand("gradient")),
                )
            })
            .collect();
        if !updated.is_empty() {
            rows.push(updated);
        }
    }
    let [head, blocks @ .., rest] = &rows[..] else {
        panic!("no updates");
    };
    assert_eq!(head.len(), 1);
    assert_eq!(head[0].0, "lm_head.weight");
    assert_eq!(blocks.len(), 3);
    for (row, layer) in blocks.iter().zip([2, 1, 0]) {
        assert_eq!(row.len(), 7);
        for (name, gradient) in row {
            assert!(name.starts_with(&format!("layers.{layer}.")), "{name}");
            assert_eq!(gradient.dtype, DType::BF16, "{name}");
        }
    }
    assert_eq!(rest.len(), 3 * 2 + 1 + 1); // norms and embedding
    let mut others = head.iter().chain(rest);
    assert!(others.all(|(_, gradient)| gradient.dtype == DType::F32));
    for pair in rows[..4].windows(2) {
        let ends = pair[0].iter().map(|(_, gradient)| gradient.live.end).max();
        let begins = pair[1]
            .iter()
            .map(|(_, gradient)| gradient.live.start)
            .min();
        assert!(ends <= begins, "{ends:?}, {begins:?}");
    }
}

/// Attention of grouped heads that rotate by halves is computed in the projections' layout. No heads are split or
/// copied, and in half precision q, k and v are one matmul. (In half precision, norms of heads return f32, which is
/// rotated before it is rounded: such heads are split.)
#[rstest::rstest]
#[case(Precision::F32, false, false)]
#[case(Precision::F32, true, false)]
#[case(Precision::F32, false, true)]
#[case(Precision::BF16, false, false)]
#[case(Precision::BF16, true, false)]
fn grouped_heads_lie_in_the_models_dimension(
    #[case] precision: Precision,
    #[case] qkv_bias: bool,
    #[case] qk_norm: bool,
) {
    let model = TransformerConfig {
        num_kv_heads: Some(3),
        rope_pairs: crate::ops::RotaryPairs::Halves,
        qkv_bias,
        qk_norm,
        ..small(2)
    };
    let config = StepConfig {
        precision,
        ..in_bf16()
    };
    let plan = gpu_plan(&flash(&model), 2, &config, [0, 0]);
    let count = |name: &str| {
        let calls = plan.calls().iter();
        calls.filter(|call| call.op.name() == name).count()
    };
    for name in ["split_heads", "merge_heads", "rope", "contiguous"] {
        assert_eq!(count(name), 0, "{name}");
    }
    let packed = precision == Precision::BF16 && !qkv_bias;
    let rotated = if packed { 1 } else { 2 }; // q and k in one call
    assert_eq!(
        (count("rotate"), count("rotate_back")),
        (2 * rotated, 2 * rotated)
    );
}

/// A block like GPT-2's: LayerNorm, one projection to q, k and v with a bias, GELU.
fn block(
    weights: &candle_nn::VarBuilder<'_>,
    x: &candle_core::Tensor,
    heads: usize,
    attention: Algorithm,
) -> Result<candle_core::Tensor> {
    use crate::{nn, ops};
    let width = x.dims()[2];
    let biased = |name: &str, from, to| nn::Linear::with_bias(from, to, weights.pp(name));
    let norm = |name: &str| nn::LayerNorm::new(width, 1e-5, weights.pp(name));
    let joined = biased("qkv", width, 3 * width)?.forward(&norm("ln_1")?.forward(x)?)?;
    let part = |i| ops::split_heads(&joined.narrow(2, i * width, width)?, heads);
    let causal = crate::attention::AttentionConfig {
        mask: crate::attention::Mask::Causal,
        ..Default::default()
    };
    let out = attention.attend(&part(0)?, &part(1)?, &part(2)?, &causal)?;
    let out = biased("proj", width, width)?.forward(&ops::merge_heads(&out)?)?;
    let x = ops::add(x, &out)?;
    let hidden = biased("fc", width, 4 * width)?.forward(&norm("ln_2")?.forward(&x)?)?;
    let hidden = ops::gelu(&hidden, ops::Gelu::Tanh)?;
    ops::add(&x, &biased("down", 4 * width, width)?.forward(&hidden)?)
}

/// A model that is not this crate's is planned for a GPU. Its attention reads the thirds of one projection in place,
/// and the copies of its weights are made before the first run.
#[rstest::rstest]
fn thirds_of_a_projection(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let weights = graph::weights(DType::F32);
    let ids = |name| graph::input(name, (2, 64), DType::U32).unwrap();
    let (tokens, targets) = (ids("tokens"), ids("targets"));
    let forward = || {
        let table = weights.pp("table").get((100, 128), "weight")?;
        let x = crate::ops::embedding(&tokens, &table)?;
        let x = block(&weights.pp("0"), &x, 2, attention)?;
        let x = block(&weights.pp("1"), &x, 2, attention)?;
        crate::ops::linear_cross_entropy(&x, &table, &targets)
    };
    let traced = || Ok(vec![precision.run(forward)?]);
    let function = TracedFunction::with_meta_weights("test", Target::Cuda, traced).unwrap();
    let config = StepConfig {
        clip_norm: Some(1.0),
        ..Default::default()
    };
    let parameters = function.parameters.len();
    let kind = PlanKind::TrainStep;
    let planned = Rc::new(function).plan(kind, &config, Recompute::default());
    let plan = planned.unwrap().lowered.plan;
    let count = |name: &str| {
        plan.calls()
            .iter()
            .filter(|call| call.op.name() == name)
            .count()
    };
    assert_eq!(
        count("contiguous") + count("split_heads") + count("rotate"),
        0
    );
    let packed = plan
        .calls()
        .iter()
        .filter(|call| call.reads.get("qkv").is_some());
    assert_eq!(packed.count(), 2 * 2); // forward and backward
    assert_eq!(count("adamw"), parameters);
    let copies = if precision == Precision::F32 {
        0
    } else {
        4 * 2 + 1
    };
    assert_eq!(plan.first_run_only().len(), copies);
    // After the first run, no weight is cast to half precision.
    let casts = plan.calls()[plan.first_run_only().end..].iter();
    let casts = casts.filter(|call| call.op.name() == "cast");
    let weights = casts
        .filter(|call| plan.buffer_of(call.reads.operand("x")).category == Category::Parameter);
    assert_eq!(weights.count(), 0);
}

/// Weights that are packed and not trained are full arguments of the plan.
#[test]
fn frozen_weights_that_are_packed() {
    let weights = graph::weights(DType::F32);
    let [w1, w3, w2] = [("w1", (24, 16)), ("w3", (24, 16)), ("w2", (16, 24))]
        .map(|(name, shape)| weights.get(shape, name).unwrap());
    let trained = weights.get((16, 16), "trained").unwrap();
    let forward = || {
        let x = graph::input("x", (8, 16), DType::F32)?;
        let h = crate::ops::linear(&x, &trained)?;
        let gated = crate::ops::swiglu_linear(&h, &w1, &w3)?;
        crate::ops::mean(&crate::ops::cast(
            &crate::ops::linear(&gated, &w2)?,
            DType::F32,
        )?)
    };
    let parameters = [("trained", &trained)].into_iter();
    let traced = || Ok(vec![Precision::BF16.run(forward)?]);
    let function = TracedFunction::new("test", Target::Cuda, parameters, traced).unwrap();
    let kind = PlanKind::TrainStep;
    let config = StepConfig::default();
    let planned = Rc::new(function).plan(kind, &config, Recompute::default());
    let plan = planned.unwrap().lowered.plan;
    let gate = |call: &&Call| call.reads.get("gate_up").is_some();
    assert_eq!(plan.calls().iter().filter(gate).count(), 1);
    for name in ["w1", "w3", "w2"] {
        let buffer = plan.buffers().iter().find(|buffer| buffer.name == name);
        assert_eq!(buffer.unwrap().elements(), 24 * 16, "{name}");
    }
}
