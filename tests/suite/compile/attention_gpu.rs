//! Attention planned on a GPU against exact results, against eager naive attention in three ops, and against itself.

use super::attention::{self as alone, flash_as_eager, plan_alone, with_others};
use super::gpu::agree;
use super::{CPU, config, distance};
use crate::check::refusal;
use crate::child;
use crate::flash::judge::check_against_same_rounding;
use crate::flash::oracle::Oracle;
use crate::flash::problem::{Attend, Problem, Results, Sizes, elements, on};
use crate::settings::{in_precision, meta_of, with_mask};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, Mask};
use tallow::compile::{Batch, Step, StepConfig};
use tallow::internals::Category;
use tallow::memory::Meter;
use tallow::model::TransformerConfig;
use tallow::precision::Precision;

/// Naive attention on the GPU as three ops. Its log-sum-exp is a placeholder that no test reads.
const EAGER: Attend = |q, k, v, config| {
    let eager: Attend = |q, k, v, config| {
        let lse = Tensor::zeros(&q.dims()[..3], DType::F32, &CPU)?;
        Ok((attention::reference::naive(q, k, v, config)?, lse))
    };
    on(&tallow::device("cuda:0")?, eager, [q, k, v], config)
};

fn run(attention: &mut Step, d_out: &Tensor) -> Results {
    let results = alone::run(attention, d_out).map(|x| {
        assert_eq!((x.dtype(), x.dims()), (d_out.dtype(), d_out.dims()));
        assert!(x.device().same_device(d_out.device()));
        elements(&x.to_device(&CPU).unwrap())
    });
    let [out, dq, dk, dv] = results;
    let lse = Vec::new(); // a planned run returns none
    Results {
        out,
        lse,
        dq,
        dk,
        dv,
        d_bias: Vec::new(),
    }
}

/// Returns the results of a first run. Later runs must have the same bits, whatever the arena held before and however
/// they are launched.
fn planned(problem: &Problem, dtype: DType, gpu: &Device) -> Results {
    let there = |x: &Tensor| x.to_device(gpu).unwrap();
    let [q, k, v] = problem.operands(dtype);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&there(&x)).unwrap());
    let d_out = there(&problem.d_out(dtype));
    let mut attention = alone::planned(Algorithm::Naive, [&q, &k, &v], &problem.config);
    let first = run(&mut attention, &d_out);
    let good = q.as_tensor().copy().unwrap();
    let poison = Tensor::full(f32::NAN, q.shape(), gpu).unwrap();
    q.set(&poison.to_dtype(dtype).unwrap()).unwrap();
    let poisoned = run(&mut attention, &d_out);
    assert!(poisoned.out.iter().all(|x| x.is_nan()));
    q.set(&good).unwrap();
    // Launched call by call, then recorded as a graph, then replayed.
    for turn in 0..3 {
        let again = run(&mut attention, &d_out);
        assert!(again.bits() == first.bits(), "{:?}, {turn}", problem.sizes);
    }
    first
}

/// Checks that errors are at most twice those of naive attention in three ops for the output, three times for
/// gradients.
fn judge(problem: &Problem, dtype: DType) {
    let gpu = crate::gpu();
    let mut oracle = Oracle::of(problem);
    oracle.results.lse.clear();
    oracle.terms.lse.clear();
    let mut eager = problem.run(dtype, EAGER);
    eager.lse.clear();
    let found = planned(problem, dtype, &gpu);
    let held = check_against_same_rounding(problem, &oracle, &found, &eager, dtype);
    held.unwrap_or_else(|error| panic!("{dtype:?} {:?}: {error}", problem.sizes));
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn as_near_as_eager(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
    #[values(
        (1, 1, 1, 16), (1, 2, 37, 9), (2, 3, 64, 16), (1, 2, 123, 24), (1, 5, 257, 40), (8, 1, 300, 64),
        (1, 2, 129, 80), (2, 1, 200, 128),
    )]
    (batch, heads, length, head_dim): (usize, usize, usize, usize),
) {
    let sizes = Sizes::new((batch, heads, heads), (length, length), head_dim);
    judge(&Problem::random(sizes, mask, None, 3), dtype);
}

/// Three blocks of queries, the last one shorter.
#[rstest]
#[ignore = "needs a CUDA device"]
fn blocks_of_queries(#[values(DType::F32, DType::BF16, DType::F16)] dtype: DType) {
    let sizes = Sizes::new((1, 1, 1), (2049, 2049), 16);
    judge(&Problem::random(sizes, Mask::Causal, Some(0.4), 4), dtype);
}

/// Seven heads in groups of four, the last group smaller: scratch memory holds the score gradients of four heads.
#[rstest]
#[ignore = "needs a CUDA device"]
fn heads_in_turns(#[values(Mask::Full, Mask::Causal)] mask: Mask) {
    let gpu = crate::gpu();
    let (shape, config) = ((7, 8100, 16), with_mask(mask));
    let draw = || Tensor::randn(0f32, 1.0, shape, &CPU).and_then(|x| x.to_device(&gpu));
    let [q, k, v, d_out] = [(); 4].map(|()| draw().unwrap());
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let mut planned = alone::planned(Algorithm::Naive, [&q, &k, &v], &config);
    let [planned_out, gradients @ ..] = alone::run(&mut planned, &d_out);
    let mut buffers = planned.plan().unwrap().buffers().iter();
    // In f32 this is the only scratch buffer.
    let d_scores = buffers
        .find(|buffer| buffer.category == Category::Scratch)
        .unwrap();
    assert_eq!(d_scores.shape, [4, 8100, 8100]);
    let out = attention::reference::naive(&q, &k, &v, &config).unwrap();
    let loss = (&out * &d_out).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    // Compared head by head: sums of 8,100 terms that mostly cancel, in another order.
    let agree = |what: &str, got: &Tensor, wanted: &Tensor| {
        for head in 0..7 {
            let [got, wanted] =
                [got, wanted].map(|x| x.get(head).unwrap().to_device(&CPU).unwrap());
            let error = distance(&got, &wanted);
            assert!(error <= 5e-5, "{what}, head {head}: {error:.1e}");
        }
    };
    agree("out", &planned_out, &out);
    for ((got, var), name) in gradients.iter().zip([&q, &k, &v]).zip(["dq", "dk", "dv"]) {
        agree(name, got, store.get(var).unwrap());
    }
}

/// Planned flash attention has the bits of eager flash attention, which runs the same kernels.
#[rstest]
#[ignore = "needs a CUDA device"]
fn flash_has_eager_flashs_bits(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
    #[values((2, 123, 24), (3, 257, 64), (2, 700, 128))] (heads, length, head_dim): (
        usize,
        usize,
        usize,
    ),
) {
    let gpu = crate::gpu();
    let config = with_mask(mask);
    let shape = [heads, 1, length, head_dim];
    flash_as_eager(&shape, head_dim, dtype, &config, &gpu);
    flash_as_eager(&shape, 64, dtype, &config, &gpu);
}

/// Naive attention in a model uses the same blocks of queries, with heads stored in rows.
#[rstest]
#[ignore = "needs a CUDA device"]
fn long_models(#[values(Precision::F32, Precision::BF16)] precision: Precision) {
    let model = meta_of(
        &TransformerConfig {
            context_length: 1300,
            ..config(1, 2, 24, 56)
        },
        Algorithm::Naive,
    );
    agree(&model, &in_precision(precision), [2, 1300]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_a_gpu_is_not_planned_for() {
    let gpu = crate::gpu();
    let config = AttentionConfig::default();
    let of = |dims: (usize, usize, usize), dtype, algorithm, config: &AttentionConfig| {
        let x = || Var::from_tensor(&Tensor::ones(dims, dtype, &gpu).unwrap()).unwrap();
        let mut step = alone::planned(algorithm, [&x(), &x(), &x()], config);
        let d_out = Tensor::ones(dims, dtype, &gpu).unwrap();
        step.forward_backward_from(Batch::new([]), &d_out)
    };
    refusal(
        of((2, 10, 12), DType::BF16, Algorithm::Flash, &config),
        &["attention::flash cannot be planned"], // eager calls run the reference instead
    );
    let below = AttentionConfig {
        scale: Some(-0.7),
        ..config.clone()
    };
    refusal(
        of((2, 10, 8), DType::F32, Algorithm::Flash, &below),
        &["attention::flash cannot be planned"],
    );
    let double = Var::zeros((2, 10, 8), DType::F64, &gpu).unwrap();
    let parameters = vec![("q".to_string(), double)];
    let double =
        Step::without_optimizer(&gpu, parameters, &StepConfig::default(), |_| unreachable!());
    refusal(double.map(drop), &["in f32, bf16 or f16", "q in f64"]);

    // A gradient that is not aligned to 16 bytes is copied, and so is one on the CPU.
    let [q, k, v] = [(); 3].map(|()| {
        let x = Tensor::randn(0f32, 1.0, (2, 10, 8), &gpu).unwrap();
        Var::from_tensor(&x).unwrap()
    });
    let mut flash = alone::planned(Algorithm::Flash, [&q, &k, &v], &config);
    let shifted = Tensor::randn(0f32, 1.0, 161, &gpu).unwrap();
    let shifted = shifted.narrow(0, 1, 160).unwrap();
    let shifted = shifted.reshape((2, 10, 8)).unwrap();
    let here = shifted.to_device(&CPU).unwrap();
    let wanted = alone::run(&mut flash, &shifted.force_contiguous().unwrap());
    for d_out in [&shifted, &here] {
        for (found, wanted) in alone::run(&mut flash, d_out).iter().zip(&wanted) {
            let [found, wanted] = [found, wanted].map(|x| elements(&x.to_device(&CPU).unwrap()));
            assert!(found == wanted);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn other_lengths_and_grouped_heads() {
    let gpu = crate::gpu();
    with_others(&gpu);
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_plan_says_what_it_is() {
    let gpu = crate::gpu();
    // In half precision the gradients of the probabilities are f32, and those of the scores need a buffer of their own.
    for (dtype, width, beside) in [(DType::F32, 4, 1), (DType::BF16, 2, 3)] {
        let config = AttentionConfig::default();
        let plan = plan_alone(&gpu, Algorithm::Naive, (4, 2, 512, 64), dtype, &config).unwrap();
        let (heads, scores) = (width * 8 * 512 * 64, width * 8 * 512 * 512);
        assert_eq!(plan.flops(), 3.0 * 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
        assert_eq!(plan.category_bytes(Category::Activation), scores);
        assert_eq!(plan.category_bytes(Category::Scratch), beside * scores);
        assert_eq!(plan.arena_bytes(), (1 + beside) * scores + 4 * heads);
        assert_eq!(plan.workspace_bytes(), 32 << 20);
        assert!(plan.explain().contains("Workspace: 32.0 MiB"));
        assert!(plan.explain().contains("probabilities @"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn memory_is_the_arena() {
    if child::ran("compile::attention_gpu::memory_is_the_arena") {
        return;
    }
    let gpu = tallow::device("cuda:0").unwrap();
    let meter = Meter::new(&gpu);
    let shape = (8, 1, 700, 64);
    let d_out = Tensor::ones(shape, DType::F32, &gpu).unwrap();
    let [q, k, v] = [(); 3].map(|()| Var::from_tensor(&d_out).unwrap());
    let taken = || meter.current_bytes().unwrap();
    let before = taken();
    let config = AttentionConfig::default();
    let mut planned = alone::planned(Algorithm::Naive, [&q, &k, &v], &config);
    let mut run = || {
        planned
            .forward_backward_from(Batch::new([]), &d_out)
            .unwrap()
    };
    run();
    gpu.synchronize().unwrap();
    let settled = taken();
    meter.reset_peak();
    (0..4).for_each(|_| run());
    gpu.synchronize().unwrap();
    assert_eq!((taken(), meter.peak_bytes().unwrap()), (settled, settled));
    let plan = planned.plan().unwrap();
    let beside = settled - before - plan.arena_bytes() - plan.workspace_bytes();
    // The buffer of the values that each run copies to the GPU, such as learning rates and the loss scale.
    assert!(beside < 4096, "{beside} bytes beside arena and workspace");
}
