//! Memory estimates of traced functions: custom functions, and models of any depth.

use super::config;
use crate::check::refusal;
use crate::child;
use crate::compile::routing::{self, How};
use crate::custom_model::gpt2::{Gpt2, Gpt2Config};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, KeyMask, ScoreBias};
use tallow::compile::{self, Batch, Step, StepConfig, StepRanks};
use tallow::distributed::Shard;
use tallow::graph::{self, Target};
use tallow::internals::gemm;
use tallow::memory::{
    AttentionWorkload, Estimate, MemoryKind, Mode, Workload, attention_breakdown, estimate,
    estimate_graph, planned_breakdown, tracker,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{Architecture, Checkpointing, DropoutRates, ForwardContext};
use tallow::ops::DropoutKey;
use tallow::precision::Precision;
use tallow::{Result, nn, no_grad, ops};

/// Live bytes after forward and at the peak, on a GPU: estimates from the time when they agreed with measurements.
#[rstest]
#[case("small", (64, 16_384), "naive", "bf16-full", "none", Mode::ForwardBackward, [5_513_650_984_452, 5_515_276_957_188])]
#[case("large", (16, 2048), "flash", "f16", "every-7", Mode::ForwardBackward, [9_145_734_148, 31_641_047_040])]
#[case("small", (1, 1), "naive", "f16-cpu-dropping-casts", "every-2", Mode::ForwardKeepingGraph, [514_728_048, 530_088_048])]
#[case("tiny", (1, 1), "naive", "bf16", "every-3", Mode::ForwardKeepingGraph, [107_346_520, 126_024_344])]
#[case("small", (16, 2048), "flash", "f16-cpu", "none", Mode::ForwardKeepingGraph, [25_242_176_512, 25_242_438_656])]
#[case("2.7b", (2, 1024), "naive", "bf16-cpu-dropping-casts", "none", Mode::ForwardBackward, [30_788_159_492, 31_195_607_040])]
#[case("10b", (16, 2048), "flash", "bf16", "none", Mode::TrainStep, [710_466_107_396, 711_148_109_824])]
#[case("2.7b", (64, 16_384), "flash", "bf16-cpu-dropping-casts", "every-7", Mode::ForwardKeepingGraph, [942_544_988_160, 1_534_061_389_824])]
#[case("small", (2, 1024), "naive", "bf16", "sqrt", Mode::TrainStep, [2_383_758_340, 2_696_343_552])]
#[case("10b", (1, 1), "flash", "bf16-cpu", "none", Mode::Forward, [51_331_446_312, 76_904_030_760])]
#[case("2.7b", (4, 256), "flash", "bf16-cpu-dropping-casts", "every-3", Mode::TrainStep, [41_442_928_644, 54_579_945_472])]
#[case("small", (16, 2048), "naive", "bf16-dropping-casts", "every-7", Mode::TrainStep, [20_175_258_628, 27_259_783_168])]
#[case("10b", (4, 256), "flash", "f16-cpu", "none", Mode::ForwardBackward, [93_494_663_172, 102_915_919_872])]
#[case("2.7b", (2, 1024), "naive", "f16-full", "sqrt", Mode::ForwardKeepingGraph, [7_785_157_632, 9_447_666_688])]
#[case("large", (64, 16_384), "flash", "bf16-cpu", "none", Mode::Forward, [24_861_750_272, 56_767_296_512])]
#[case("2.7b", (2, 1024), "flash", "f16-dropping-casts", "every-7", Mode::ForwardKeepingGraph, [15_444_387_840, 16_612_083_712])]
#[case("tiny", (2, 1024), "naive", "bf16-dropping-casts", "none", Mode::ForwardBackward, [696_133_636, 718_710_788])]
#[case("medium", (16, 2048), "flash", "bf16-cpu-dropping-casts", "block", Mode::ForwardBackward, [8_392_740_868, 8_500_809_732])]
#[case("tiny", (64, 16_384), "naive", "f16-cpu", "none", Mode::ForwardKeepingGraph, [2_371_035_957_248, 2_371_037_005_824])]
#[case("large", (64, 16_384), "naive", "f32", "block", Mode::TrainStep, [1_776_973_552_644, 1_799_646_746_624])]
#[case("xl", (2, 1024), "naive", "bf16-cpu-dropping-casts", "none", Mode::ForwardKeepingGraph, [25_079_847_168, 25_111_847_168])]
#[case("small", (4, 256), "naive", "f16", "every-7", Mode::ForwardKeepingGraph, [986_213_376, 1_118_366_720])]
#[case("xl", (2, 1024), "flash", "f16-full", "every-3", Mode::ForwardKeepingGraph, [4_721_405_056, 4_721_405_056])]
#[case("medium", (16, 2048), "naive", "bf16-cpu-dropping-casts", "none", Mode::ForwardKeepingGraph, [115_459_035_136, 115_479_515_136])]
#[case("10b", (64, 16_384), "naive", "f16", "every-7", Mode::ForwardBackward, [1_822_084_540_420, 11_247_067_250_688])]
#[case("large", (64, 16_384), "naive", "f16-full", "none", Mode::ForwardKeepingGraph, [27_473_742_928_384, 27_473_742_928_384])]
#[case("xl", (16, 2048), "flash", "bf16-cpu", "block", Mode::ForwardKeepingGraph, [23_237_681_408, 27_088_183_552])]
#[case("2.7b", (2, 1024), "naive", "f16-cpu-dropping-casts", "block", Mode::ForwardKeepingGraph, [14_904_453_120, 14_955_653_120])]
#[case("xl", (2, 1024), "naive", "bf16-cpu-dropping-casts", "block", Mode::ForwardBackward, [9_037_461_764, 16_314_273_792])]
#[case("10b", (16, 2048), "flash", "f16-cpu-dropping-casts", "every-2", Mode::ForwardKeepingGraph, [89_147_140_096, 89_239_300_096])]
#[case("2.7b", (4, 256), "flash", "f16-cpu-dropping-casts", "none", Mode::ForwardBackward, [20_226_856_964, 27_294_011_392])]
#[case("medium", (64, 16_384), "flash", "f16", "every-7", Mode::TrainStep, [301_313_011_716, 635_342_725_120])]
#[case("xl", (3, 17), "flash", "bf16-full", "every-7", Mode::TrainStep, [28_006_134_672, 31_973_443_684])]
#[case("10b", (4, 256), "flash", "f16-cpu", "every-2", Mode::ForwardKeepingGraph, [53_624_514_560, 78_085_761_024])]
#[case("10b", (2, 1024), "naive", "bf16-cpu", "every-7", Mode::ForwardKeepingGraph, [53_126_457_344, 82_154_588_160])]
#[case("tiny", (16, 2048), "flash", "f16-full", "every-2", Mode::ForwardBackward, [2_477_564_932, 2_521_359_364])]
#[case("small", (3, 17), "flash", "f16-cpu", "none", Mode::Forward, [515_587_576, 757_675_000])]
fn figures_stay_what_they_were(
    #[case] preset: &str,
    #[case] (batch_size, sequence_length): (usize, usize),
    #[case] attention: Algorithm,
    #[case] precision: Precision,
    #[case] checkpointing: Checkpointing,
    #[case] mode: Mode,
    #[case] wanted: [u64; 2],
) {
    let workload = Workload {
        batch_size,
        sequence_length,
        mode,
        attention,
        precision,
        checkpointing,
        kernels: Target::Cuda,
        ..Default::default()
    };
    let plan = estimate(&TransformerConfig::preset(preset).unwrap(), &workload).unwrap();
    assert_eq!([plan.after_forward_bytes, plan.peak_bytes], wanted);
}

/// A custom model: tied weights, a frozen one, a bias that is used twice.
struct CustomModel {
    /// (V, D), embedding and head.
    table: Var,
    norm: nn::LayerNorm,
    up: nn::Linear,
    /// (D, F), frozen.
    down: Tensor,
    bias: Var,
    qkv: nn::Linear,
    terms: Var,
}

impl CustomModel {
    fn new() -> Result<Self> {
        let vb = nn::seeded(1, DType::F32, &Device::Cpu);
        Ok(Self {
            table: Var::randn(0f32, 1.0, (700, 96), &Device::Cpu)?,
            norm: nn::LayerNorm::new(96, 1e-5, vb.pp("norm"))?,
            up: nn::Linear::new(96, 400, vb.pp("up"))?,
            down: Tensor::randn(0f32, 0.1, (96, 400), &Device::Cpu)?,
            bias: Var::zeros(96, DType::F32, &Device::Cpu)?,
            qkv: nn::Linear::new(96, 96, vb.pp("qkv"))?,
            terms: Var::randn(0f32, 1.0, (4, 100, 100), &Device::Cpu)?,
        })
    }

    fn feed_forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = ops::relu(&self.up.forward(&self.norm.forward(x)?)?)?;
        let y = ops::linear_bias(&hidden, &self.down, &self.bias)?;
        ops::add(&ops::add(x, &y)?, &self.bias)
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let heads = ops::split_heads(&self.qkv.forward(x)?, 4)?;
        let out = attention::flash(&heads, &heads, &heads, &AttentionConfig::default())?;
        ops::add(x, &ops::merge_heads(&out)?)
    }

    /// Attends with padding and a trained bias.
    fn masked_loss(
        &self,
        algorithm: Algorithm,
        tokens: &Tensor,
        targets: &Tensor,
    ) -> Result<Tensor> {
        let x = ops::embedding(tokens, &self.table)?;
        let heads = ops::split_heads(&self.qkv.forward(&x)?, 4)?;
        let visible = Tensor::ones(tokens.shape(), DType::U8, &Device::Cpu)?;
        let config = AttentionConfig {
            key_mask: Some(KeyMask::padding(&visible)?),
            bias: Some(ScoreBias::new(&self.terms)?),
            ..Default::default()
        };
        let out = algorithm.attend(&heads, &heads, &heads, &config)?;
        let x = self.feed_forward(&ops::add(&x, &ops::merge_heads(&out)?)?)?;
        ops::cross_entropy(&ops::linear(&x, &self.table)?, targets)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let x = ops::embedding(tokens, &self.table)?;
        let x = self.attend(&x)?;
        let x = self.feed_forward(&x)?;
        let x = self.attend(&x)?;
        let x = self.feed_forward(&x)?;
        let logits = ops::linear(&x, &self.table)?;
        ops::cross_entropy(&logits, targets)
    }
}

/// Returns a model with dropout everywhere, for which no mask is saved.
fn dropping(attention: Algorithm) -> Result<TransformerLM> {
    let config = TransformerConfig {
        architecture: Architecture::Gpt2,
        dropout: DropoutRates::all(0.1),
        ..config(64, 160, 4, 300)
    };
    TransformerLM::new(&config, 0, &Device::Cpu)?.with_attention(attention)
}

/// Returns estimated and measured bytes of `loss`, forward and backward: live after forward, and at the peak.
fn compared(loss: impl Fn() -> Result<Tensor>) -> ([u64; 2], [u64; 2], Estimate) {
    let traced = graph::trace(Target::Cpu, &loss).unwrap();
    let plan = estimate_graph(&traced, Mode::ForwardBackward).unwrap();
    for _ in 0..2 {
        drop(tallow::backward(loss().unwrap()).unwrap());
    }
    let before = tracker::current_bytes().unwrap();
    tracker::reset_peak();
    let out = loss().unwrap();
    let after_forward = tracker::current_bytes().unwrap() - before;
    let gradients = tallow::backward(out).unwrap();
    let peak = tracker::peak_bytes().unwrap() - before;
    drop(gradients);
    let predicted = [plan.after_forward_bytes, plan.peak_bytes];
    let there = plan.breakdown.bytes_of(MemoryKind::Weights) + traced_inputs(&traced);
    (predicted, [there + after_forward, there + peak], plan)
}

/// Returns the bytes of inputs and constants, which exist before the function runs.
fn traced_inputs(traced: &graph::Graph) -> u64 {
    let from_outside = |value: &&graph::Value| {
        matches!(
            value.source,
            graph::Source::Input(_) | graph::Source::Constant
        )
    };
    let values = traced.values().iter().filter(from_outside);
    values.map(|value| value.bytes() as u64).sum()
}

/// Returns a description if estimate and measurement differ by more than 1% and the records of tensors and ops.
fn mismatch(
    what: &str,
    (predicted, measured, plan): ([u64; 2], [u64; 2], Estimate),
) -> Option<String> {
    let line = format!("{what}: {predicted:?} {measured:?}");
    println!("{line}");
    // A thread without work allocates no scratch memory.
    let idle = [0, 1 << 20];
    let mut pairs = predicted.iter().zip(&measured).zip(idle);
    let fits = pairs.all(|((predicted, measured), idle)| {
        let slack = measured / 100 + 32 * 1024;
        let beyond = if predicted > measured { idle } else { 0 };
        predicted.abs_diff(*measured) < slack + beyond
    });
    (!fits).then(|| format!("{line}\n{plan}"))
}

#[test]
fn a_model_of_ones_own_takes_what_is_predicted() {
    if child::ran("memory::graphs::a_model_of_ones_own_takes_what_is_predicted") {
        return;
    }
    let custom = CustomModel::new().unwrap();
    let ids = |rows: usize, length| Tensor::ones((rows, length), DType::U32, &Device::Cpu).unwrap();
    let mut wrong = Vec::new();
    gemm::reserve_scratch(true).unwrap();
    for precision in [Precision::F32, Precision::BF16] {
        for rows in [1, 8, 24] {
            let (tokens, targets) = (ids(rows, 100), ids(rows, 100));
            let found = compared(|| precision.run(|| custom.loss(&tokens, &targets)));
            wrong.extend(mismatch(&format!("custom {rows} {precision}"), found));
            for algorithm in Algorithm::ALL {
                let loss = || custom.masked_loss(algorithm, &tokens, &targets);
                let found = compared(|| precision.run(loss));
                let what = format!("masked {algorithm} {rows} {precision}");
                wrong.extend(mismatch(&what, found));
            }
        }
        for attention in Algorithm::ALL {
            for (rows, vocab_size) in [(2, 300), (8, 300), (8, 4000)] {
                let config = Gpt2Config {
                    vocab_size,
                    n_positions: 128,
                    n_embd: 64,
                    n_layer: 4,
                    n_head: 4,
                    attention,
                };
                let vb = nn::seeded(0, DType::F32, &Device::Cpu);
                let model = Gpt2::new(config, vb).unwrap();
                let (tokens, targets) = (ids(rows, 128), ids(rows, 128));
                let found = compared(|| precision.run(|| model.loss(&tokens, &targets)));
                let what = format!("GPT-2 {rows} {vocab_size} {attention} {precision}");
                wrong.extend(mismatch(&what, found));
            }
            let whole = dropping(attention).unwrap();
            let (tokens, targets) = (ids(8, 128), ids(8, 128));
            let model = whole
                .clone()
                .freeze(|name| !name.starts_with("layers.3."))
                .unwrap();
            let frozen = compared(|| precision.run(|| model.loss(&tokens, &targets)));
            let all = compared(|| precision.run(|| whole.loss(&tokens, &targets)));
            assert!(2 * frozen.0[0] < all.0[0] && 2 * frozen.1[1] < all.1[1]);
            wrong.extend(mismatch(&format!("frozen {attention} {precision}"), frozen));
            let model = whole;
            let context = ForwardContext::training(DropoutKey::new(1, 0).unwrap());
            let loss = || model.loss_with(&tokens, &targets, &context, None);
            let found = compared(|| precision.run(loss));
            wrong.extend(mismatch(&format!("dropout {attention} {precision}"), found));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_mixture_of_experts_takes_what_is_predicted() {
    if child::ran("memory::graphs::a_mixture_of_experts_takes_what_is_predicted") {
        return;
    }
    let random = |dims: &[usize]| Var::randn(0f32, 0.1, dims, &Device::Cpu).unwrap();
    let [router, w1, w2] = [&[8, 64][..], &[8, 96, 64], &[8, 64, 96]].map(random);
    let mut wrong = Vec::new();
    gemm::reserve_scratch(true).unwrap();
    for tokens in [40, 640] {
        let x = random(&[tokens, 64]).detach();
        let capacity = tokens / 4;
        for how in [How::Dense, How::Routed(capacity), How::Checkpointed] {
            let found = compared(|| routing::loss(how, [&x, &router, &w1, &w2]));
            wrong.extend(mismatch(&format!("{how:?} {tokens}"), found));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_has_no_gradient_has_no_backward() {
    let layer = nn::Linear::new(3, 3, graph::weights(DType::F32)).unwrap();
    let x = graph::input("x", (2, 3), DType::F32).unwrap();
    let traced = graph::trace(Target::Cpu, || no_grad(|| layer.forward(&x))).unwrap();
    let forward = estimate_graph(&traced, Mode::Forward).unwrap();
    assert_eq!(forward.peak_bytes, forward.breakdown.peak_bytes());
    refusal(estimate_graph(&traced, Mode::TrainStep), &["no gradient"]);
}

/// The deepest walk through candle's graph is a loop here, not a recursion.
#[test]
fn a_deep_graph_is_followed() {
    let x = Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    let deep = || (0..500).try_fold(x.as_tensor().clone(), |x, _| ops::relu(&x));
    let traced = graph::trace(Target::Cpu, deep).unwrap();
    let plan = estimate_graph(&traced, Mode::ForwardBackward).unwrap();
    assert_eq!(plan.after_forward_bytes, 16 * 501);
}

/// The memory of a planned step with each of its options: the plan's own bytes by kind.
#[test]
fn a_plans_memory_by_kind() {
    let own = Shard {
        rank: 0,
        world_size: 4,
    };
    let with = |ranks| StepConfig {
        ranks,
        ..Default::default()
    };
    let alone = StepConfig::default();
    let model = TransformerLM::meta(&TransformerConfig::default()).unwrap();
    let parameters = 4 * model.num_parameters() as u64;
    let batch = Batch::meta(8, 128).unwrap();
    for target in [compile::Target::Cpu, compile::Target::Cuda] {
        let of = |config: &StepConfig| {
            let plan = Step::plan_for_model(target, &model, config, &batch);
            let (plan, _) = plan.unwrap();
            let breakdown = planned_breakdown(&plan);
            assert_eq!(breakdown.peak_bytes(), plan.total_bytes());
            assert!(breakdown.before_backward_bytes <= plan.total_bytes());
            breakdown
        };
        let [weights, state] = [MemoryKind::Weights, MemoryKind::Optimizer];
        let whole = of(&alone);
        assert_eq!(whole.bytes_of(weights), parameters);
        assert_eq!(whole.bytes_of(state), 2 * parameters);
        let sharded = of(&with(StepRanks::ShardedOptimizer(Default::default(), own)));
        assert_eq!(sharded.bytes_of(weights), parameters);
        assert!(sharded.bytes_of(state) < parameters);
        let parts = of(&with(StepRanks::FullySharded(Default::default(), own)));
        assert!(parts.bytes_of(weights) < parameters / 3);
        assert!(parts.bytes_of(state) < parameters);
        let accumulated = of(&StepConfig {
            accumulation: 4,
            ..alone.clone()
        });
        assert!(
            accumulated.bytes_of(MemoryKind::Activations) < whole.bytes_of(MemoryKind::Activations)
        );
        let in_backward = of(&StepConfig {
            optimizer_in_backward: true,
            ..alone.clone()
        });
        assert!(in_backward.peak_bytes() <= whole.peak_bytes());
    }
}

#[test]
fn attention_of_nothing_takes_nothing() {
    for algorithm in Algorithm::ALL {
        for (batch_size, sequence_length) in [(0, 8), (2, 0)] {
            for (kernels, documents) in [(Target::Cpu, 1), (Target::Cuda, 1), (Target::Cpu, 2)] {
                let workload = AttentionWorkload {
                    algorithm,
                    batch_size,
                    sequence_length,
                    documents,
                    ..Default::default()
                };
                let breakdown = attention_breakdown(&workload, kernels).unwrap();
                assert_eq!(breakdown.bytes_of(MemoryKind::Inputs), 0);
            }
        }
    }
}

/// The gradient of `w` is also the gradient of the sum, which the ops of the other operand read and leave intact.
#[test]
fn a_weights_gradient_that_is_passed_on_stays() {
    let weights = graph::weights(DType::F32);
    let weight = |name, width| weights.get((64, width), name).unwrap();
    let (w, u) = (weight("w", 64), weight("u", 4096));
    let x = graph::input("x", (64, 4096), DType::F32).unwrap();
    let traced = graph::trace(Target::Cpu, || {
        ops::sum(&ops::add(&w, &ops::relu(&ops::linear(&x, &u)?)?)?)
    });
    let plan = estimate_graph(&traced.unwrap(), Mode::ForwardBackward).unwrap();
    // The peak is where the gradient of u is computed, two ops later.
    let gradients = plan.breakdown.bytes_of(MemoryKind::Gradients);
    assert_eq!(gradients, 4 * 64 * (64 + 4096), "{plan}");
}

/// Tensors returned with the loss stay allocated until the end.
#[test]
fn what_is_returned_stays() {
    let weights = graph::weights(DType::F32);
    let weight = |name, width| weights.get((256, width), name).unwrap();
    let (up, down) = (weight("up", 256), weight("down", 256));
    let x = graph::input("x", (4, 256), DType::F32).unwrap();
    let function = || {
        let hidden = ops::linear(&x, &up)?;
        let y = ops::linear(&hidden, &down)?;
        Ok::<_, tallow::Error>((ops::sum(&y)?, y))
    };
    let alone = || Ok(function()?.0);
    let of = |traced: Result<graph::Graph>| {
        let plan = estimate_graph(&traced.unwrap(), Mode::ForwardBackward).unwrap();
        plan.peak_bytes
    };
    let both = of(graph::trace(Target::Cpu, || {
        let (loss, y) = function()?;
        Ok(vec![loss, y])
    }));
    let loss = of(graph::trace(Target::Cpu, alone));
    // At the last weight's gradient, the difference is y, which is returned.
    assert_eq!(both - loss, 4 * 4 * 256);
}
