//! Estimates of traced functions: any function's, and a model's, whatever its depth.

use super::precisions::every_precision;
use super::{MODES, config};
use crate::child;
use crate::custom_model::gpt2::{Gpt2, Gpt2Config};
use candle_core::{DType, Device, Tensor, Var};
use tallow::attention::{self, Algorithm, AttentionConfig};
use tallow::graph::{self, Target};
use tallow::kernels::cpu::gemm;
use tallow::memory::{
    Estimate, Kernels, MemoryKind, Mode, Workload, estimate, estimate_graph, measure, tracker,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::precision::Precision;
use tallow::{Result, nn, no_grad, ops};

/// The pass of a workload in which every block is traced.
fn whole(config: &TransformerConfig, workload: &Workload) -> Estimate {
    let config = TransformerConfig {
        attention: workload.attention,
        checkpointing: workload.checkpointing,
        ..config.clone()
    };
    let dtype = workload.precision.parameter_dtype();
    let shape = (workload.batch_size, workload.sequence_length);
    let forward = || {
        let model = TransformerLM::from_var_builder(&config, graph::weights(dtype))?;
        let tokens = graph::input("tokens", shape, DType::U32)?;
        let targets = graph::input("targets", shape, DType::U32)?;
        workload.precision.run(|| match workload.mode {
            Mode::Forward | Mode::ForwardKeepingGraph => model.forward(&tokens),
            Mode::ForwardBackward | Mode::TrainStep => model.loss(&tokens, &targets),
        })
    };
    let traced = graph::trace(workload.kernels, || match workload.mode {
        Mode::Forward => no_grad(forward),
        _ => forward(),
    });
    estimate_graph(&traced.unwrap(), workload.mode).unwrap()
}

/// Three blocks, and three segments, stand for all: to the byte, and for everything that buffers are there for.
#[test]
fn a_few_blocks_stand_for_all() {
    let mut wrong = Vec::new();
    let strategies = [
        "none", "release", "block", "every-2", "every-4", "every-20", "sqrt",
    ];
    for layers in [1, 2, 3, 4, 9, 17] {
        for (i, precision) in every_precision().into_iter().enumerate() {
            for (j, strategy) in strategies.into_iter().enumerate() {
                for mode in MODES {
                    let config = config(64, 160, layers, 300);
                    let workload = Workload {
                        batch_size: 3,
                        sequence_length: config.context_length,
                        mode,
                        attention: Algorithm::ALL[(i + j) % 2],
                        precision,
                        checkpointing: strategy.parse().unwrap(),
                        kernels: [Kernels::Cpu, Kernels::Cuda][(i + j + layers) % 3 % 2],
                    };
                    let (plan, whole) = (
                        estimate(&config, &workload).unwrap(),
                        whole(&config, &workload),
                    );
                    // A forward does not read the targets, which are there all the same.
                    let targets = match mode {
                        Mode::Forward | Mode::ForwardKeepingGraph => 4 * 3 * 128,
                        _ => 0,
                    };
                    let same = MemoryKind::ALL.iter().all(|holds| {
                        let more = if *holds == MemoryKind::Inputs {
                            targets
                        } else {
                            0
                        };
                        plan.breakdown.bytes_of(*holds) == whole.breakdown.bytes_of(*holds) + more
                    });
                    if !same
                        || plan.peak_bytes != whole.peak_bytes + targets
                        || plan.after_forward_bytes != whole.after_forward_bytes + targets
                    {
                        wrong.push(format!(
                            "{layers} {workload:?}: {} {}",
                            plan.peak_bytes, whole.peak_bytes
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A row of [`FIGURES`]: preset, B, T, attention, precision, checkpointing, mode; alive after forward, and at the peak.
type Figure = (
    &'static str,
    usize,
    usize,
    &'static str,
    &'static str,
    &'static str,
    Mode,
    [u64; 2],
);

/// What this crate's first breakdown had, which followed one model by hand, on a GPU. Eight peaks, in the backward of a
/// gated feed-forward, are a weight's gradient less: the gate's gradient is freed before the last one is made.
const FIGURES: [Figure; 37] = [
    (
        "small",
        64,
        16_384,
        "naive",
        "bf16-full",
        "release",
        Mode::ForwardBackward,
        [5_552_297_301_508, 5_555_509_771_268],
    ),
    (
        "large",
        16,
        2048,
        "flash",
        "f16",
        "every-7",
        Mode::ForwardBackward,
        [9_481_540_612, 33_993_760_772],
    ),
    (
        "small",
        1,
        1,
        "naive",
        "f16-cpu-dropping-casts",
        "every-2",
        Mode::ForwardKeepingGraph,
        [514_740_336, 530_100_336],
    ),
    (
        "tiny",
        1,
        1,
        "naive",
        "bf16",
        "every-3",
        Mode::ForwardKeepingGraph,
        [107_350_744, 126_028_504],
    ),
    (
        "small",
        16,
        2048,
        "flash",
        "f16-cpu",
        "release",
        Mode::ForwardKeepingGraph,
        [27_670_154_240, 27_670_154_240],
    ),
    (
        "2.7b",
        2,
        1024,
        "naive",
        "bf16-cpu-dropping-casts",
        "release",
        Mode::ForwardBackward,
        [32_130_320_388, 32_810_430_468],
    ),
    (
        "10b",
        16,
        2048,
        "flash",
        "bf16",
        "none",
        Mode::TrainStep,
        [710_569_654_276, 763_816_890_372],
    ),
    (
        "2.7b",
        64,
        16_384,
        "flash",
        "bf16-cpu-dropping-casts",
        "every-7",
        Mode::ForwardKeepingGraph,
        [1_028_444_334_080, 1_534_061_389_824],
    ),
    (
        "small",
        2,
        1024,
        "naive",
        "bf16",
        "sqrt",
        Mode::TrainStep,
        [2_435_908_612, 2_928_272_388],
    ),
    (
        "10b",
        1,
        1,
        "flash",
        "bf16-cpu",
        "none",
        Mode::Forward,
        [51_331_446_312, 76_904_030_760],
    ),
    (
        "2.7b",
        4,
        256,
        "flash",
        "bf16-cpu-dropping-casts",
        "every-3",
        Mode::TrainStep,
        [41_484_863_492, 55_335_534_596],
    ),
    (
        "small",
        16,
        2048,
        "naive",
        "bf16-dropping-casts",
        "every-7",
        Mode::TrainStep,
        [21_181_629_444, 28_493_207_556],
    ),
    (
        "10b",
        4,
        256,
        "flash",
        "f16-cpu",
        "release",
        Mode::ForwardBackward,
        [95_395_067_908, 104_647_161_860],
    ),
    (
        "2.7b",
        2,
        1024,
        "naive",
        "f16-full",
        "sqrt",
        Mode::ForwardKeepingGraph,
        [7_827_100_672, 9_447_666_688],
    ),
    (
        "large",
        64,
        16_384,
        "flash",
        "bf16-cpu",
        "none",
        Mode::Forward,
        [24_861_750_272, 56_767_296_512],
    ),
    (
        "2.7b",
        2,
        1024,
        "flash",
        "f16-dropping-casts",
        "every-7",
        Mode::ForwardKeepingGraph,
        [15_612_160_000, 16_612_083_712],
    ),
    (
        "tiny",
        2,
        1024,
        "naive",
        "bf16-dropping-casts",
        "none",
        Mode::ForwardBackward,
        [696_117_252, 791_097_348],
    ),
    (
        "medium",
        16,
        2048,
        "flash",
        "bf16-cpu-dropping-casts",
        "block",
        Mode::ForwardBackward,
        [8_660_914_180, 10_764_615_684],
    ),
    (
        "tiny",
        64,
        16_384,
        "naive",
        "f16-cpu",
        "none",
        Mode::ForwardKeepingGraph,
        [2_371_050_637_312, 2_371_050_637_312],
    ),
    (
        "large",
        64,
        16_384,
        "naive",
        "f32",
        "block",
        Mode::TrainStep,
        [1_787_702_582_276, 1_830_064_187_396],
    ),
    (
        "xl",
        2,
        1024,
        "naive",
        "bf16-cpu-dropping-casts",
        "release",
        Mode::ForwardKeepingGraph,
        [26_338_138_368, 26_370_138_368],
    ),
    (
        "small",
        4,
        256,
        "naive",
        "f16",
        "every-7",
        Mode::ForwardKeepingGraph,
        [1_018_260_480, 1_150_381_056],
    ),
    (
        "xl",
        2,
        1024,
        "flash",
        "f16-full",
        "every-3",
        Mode::ForwardKeepingGraph,
        [4_760_726_656, 4_760_726_656],
    ),
    (
        "medium",
        16,
        2048,
        "naive",
        "bf16-cpu-dropping-casts",
        "none",
        Mode::ForwardKeepingGraph,
        [115_459_035_136, 115_479_515_136],
    ),
    (
        "10b",
        64,
        16_384,
        "naive",
        "f16",
        "every-7",
        Mode::ForwardBackward,
        [1_860_739_246_084, 11_412_278_345_732],
    ),
    (
        "large",
        64,
        16_384,
        "naive",
        "f16-full",
        "none",
        Mode::ForwardKeepingGraph,
        [27_473_742_928_384, 27_473_742_928_384],
    ),
    (
        "xl",
        16,
        2048,
        "flash",
        "bf16-cpu",
        "block",
        Mode::ForwardKeepingGraph,
        [23_657_636_096, 27_507_876_096],
    ),
    (
        "2.7b",
        2,
        1024,
        "naive",
        "f16-cpu-dropping-casts",
        "block",
        Mode::ForwardKeepingGraph,
        [14_946_396_160, 14_997_596_160],
    ),
    (
        "xl",
        2,
        1024,
        "naive",
        "bf16-cpu-dropping-casts",
        "block",
        Mode::ForwardBackward,
        [9_063_659_780, 17_051_570_180],
    ),
    (
        "10b",
        16,
        2048,
        "flash",
        "f16-cpu-dropping-casts",
        "every-2",
        Mode::ForwardKeepingGraph,
        [91_563_059_200, 91_655_219_200],
    ),
    (
        "2.7b",
        4,
        256,
        "flash",
        "f16-cpu-dropping-casts",
        "release",
        Mode::ForwardBackward,
        [20_897_937_412, 27_881_222_148],
    ),
    (
        "medium",
        64,
        16_384,
        "flash",
        "f16",
        "every-7",
        Mode::TrainStep,
        [327_095_398_404, 671_136_587_780],
    ),
    (
        "xl",
        3,
        17,
        "flash",
        "bf16-full",
        "every-7",
        Mode::TrainStep,
        [28_008_092_664, 32_038_244_992],
    ),
    (
        "10b",
        4,
        256,
        "flash",
        "f16-cpu",
        "every-2",
        Mode::ForwardKeepingGraph,
        [53_700_405_248, 78_161_586_176],
    ),
    (
        "10b",
        2,
        1024,
        "naive",
        "bf16-cpu",
        "every-7",
        Mode::ForwardKeepingGraph,
        [53_202_479_104, 82_161_141_760],
    ),
    (
        "tiny",
        16,
        2048,
        "flash",
        "f16-full",
        "every-2",
        Mode::ForwardBackward,
        [2_611_520_516, 2_655_577_092],
    ),
    (
        "small",
        3,
        17,
        "flash",
        "f16-cpu",
        "none",
        Mode::Forward,
        [515_587_576, 757_675_000],
    ),
];

#[test]
fn figures_stay_what_they_were() {
    let mut changed = Vec::new();
    for (preset, batch_size, sequence_length, attention, precision, checkpointing, mode, wanted) in
        FIGURES
    {
        let workload = Workload {
            batch_size,
            sequence_length,
            mode,
            attention: attention.parse().unwrap(),
            precision: precision.parse().unwrap(),
            checkpointing: checkpointing.parse().unwrap(),
            kernels: Kernels::Cuda,
        };
        let plan = estimate(&TransformerConfig::preset(preset).unwrap(), &workload).unwrap();
        let found = [plan.after_forward_bytes, plan.peak_bytes];
        if found != wanted {
            changed.push(format!("{preset} {workload:?}: {found:?} for {wanted:?}"));
        }
    }
    assert!(changed.is_empty(), "{changed:#?}");
}

/// Without a graph a segment's input goes with the segment, while copies of weights go on growing.
#[test]
fn segments_without_a_graph_take_what_is_predicted() {
    if child::ran("memory::graphs::segments_without_a_graph_take_what_is_predicted") {
        return;
    }
    for (layers, strategy) in [(3, "every-2"), (9, "every-2"), (9, "sqrt"), (9, "every-5")] {
        let config = config(64, 160, layers, 300);
        let workload = Workload {
            batch_size: 8,
            sequence_length: 128,
            mode: Mode::Forward,
            attention: Algorithm::Flash,
            precision: Precision::BF16,
            checkpointing: strategy.parse().unwrap(),
            ..Default::default()
        };
        let plan = estimate(&config, &workload).unwrap();
        let measured = measure(&config, &workload).unwrap();
        println!("{layers} {strategy}: {} {measured:?}", plan.peak_bytes);
        // Of tensors and ops; a block's copies of weights have 94,208 bytes.
        let records = 12 * 1024 * layers as u64;
        assert!(
            plan.peak_bytes.abs_diff(measured.peak_bytes) < records,
            "{layers} {strategy}: {} {measured:?}",
            plan.peak_bytes
        );
    }
}

/// A model that is nobody's: tied weights, a frozen one, a bias that is used twice, segments whose graph is freed.
struct Mine {
    /// (V, D), embedding and head.
    table: Var,
    norm: nn::LayerNorm,
    up: nn::Linear,
    /// (D, F), frozen.
    down: Tensor,
    bias: Var,
    qkv: nn::Linear,
}

impl Mine {
    fn new() -> Result<Self> {
        let vb = nn::seeded(1, DType::F32, &Device::Cpu);
        Ok(Self {
            table: Var::randn(0f32, 1.0, (700, 96), &Device::Cpu)?,
            norm: nn::LayerNorm::new(96, 1e-5, vb.pp("norm"))?,
            up: nn::Linear::new(96, 400, vb.pp("up"))?,
            down: Tensor::randn(0f32, 0.1, (96, 400), &Device::Cpu)?,
            bias: Var::zeros(96, DType::F32, &Device::Cpu)?,
            qkv: nn::Linear::new(96, 96, vb.pp("qkv"))?,
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

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let x = ops::embedding(tokens, &self.table)?;
        let x = self.attend(&x)?;
        let x = nn::release(|[x]| self.feed_forward(x), [&x])?;
        let x = nn::release(|[x]| self.attend(x), [&x])?;
        let x = self.feed_forward(&x)?;
        let logits = ops::linear(&x, &self.table)?;
        ops::cross_entropy(&logits, targets)
    }
}

/// What is predicted of `loss` and what it takes, forward and backward: alive after forward, and at the peak.
fn compared(loss: impl Fn() -> Result<Tensor>) -> ([u64; 2], [u64; 2], Estimate) {
    let traced = graph::trace(Target::Cpu, &loss).unwrap();
    let plan = estimate_graph(&traced, Mode::ForwardBackward).unwrap();
    for _ in 0..2 {
        drop(loss().unwrap().backward().unwrap());
    }
    let before = tracker::current_bytes().unwrap();
    tracker::reset_peak();
    let out = loss().unwrap();
    let after_forward = tracker::current_bytes().unwrap() - before;
    let gradients = out.backward().unwrap();
    let peak = tracker::peak_bytes().unwrap() - before;
    drop((out, gradients));
    let predicted = [plan.after_forward_bytes, plan.peak_bytes];
    let there = plan.breakdown.bytes_of(MemoryKind::Weights) + traced_inputs(&traced);
    (predicted, [there + after_forward, there + peak], plan)
}

/// Bytes that are there before the function runs, beside weights.
fn traced_inputs(traced: &graph::Graph) -> u64 {
    let from_outside = |value: &&graph::Value| {
        matches!(
            value.source,
            graph::Source::Input(_) | graph::Source::Constant
        )
    };
    let values = traced.values.iter().filter(from_outside);
    values.map(|value| value.bytes() as u64).sum()
}

/// Where they differ by more than a hundredth and the records of tensors and ops, in words.
fn far(what: &str, (predicted, measured, plan): ([u64; 2], [u64; 2], Estimate)) -> Option<String> {
    let line = format!("{what}: {predicted:?} {measured:?}");
    println!("{line}");
    // A thread that finds no work holds none of the scratch.
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
    let mine = Mine::new().unwrap();
    let ids = |rows: usize, length| Tensor::ones((rows, length), DType::U32, &Device::Cpu).unwrap();
    let mut wrong = Vec::new();
    gemm::reserve_scratch(true);
    for precision in [Precision::F32, Precision::BF16] {
        for rows in [1, 8, 24] {
            let (tokens, targets) = (ids(rows, 100), ids(rows, 100));
            let found = compared(|| precision.run(|| mine.loss(&tokens, &targets)));
            wrong.extend(far(&format!("mine {rows} {precision}"), found));
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
                wrong.extend(far(&what, found));
            }
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
    let error = estimate_graph(&traced, Mode::TrainStep).unwrap_err();
    assert!(error.to_string().contains("no gradient"), "{error}");
}

/// The longest walk through candle's graph is a loop here, not a recursion.
#[test]
fn a_deep_graph_is_replayed() {
    let x = Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    let deep = || (0..500).try_fold(x.as_tensor().clone(), |x, _| ops::relu(&x));
    let traced = graph::trace(Target::Cpu, deep).unwrap();
    let plan = estimate_graph(&traced, Mode::ForwardBackward).unwrap();
    assert_eq!(plan.after_forward_bytes, 16 * 501);
}
