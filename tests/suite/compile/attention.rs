//! Planned attention against eager naive attention.

use super::{CPU, distance};
use crate::check::refusal;
use crate::child;
use crate::flash::problem::elements;
use crate::settings::with_mask;
use candle_core::{DType, Device, Shape, Tensor, Var};
use rayon::ThreadPoolBuilder;
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, Mask};
use tallow::compile::{Batch, Plan, PlanKind, Step, StepConfig, Target};
use tallow::graph;
use tallow::internals::ALIGNMENT_BYTES;
use tallow::internals::Category;
use tallow::memory::{AttentionWorkload, planned_attention_breakdown, tracker};

/// Plans attention alone; q, k and v are its parameters.
pub fn planned(
    algorithm: Algorithm,
    [q, k, v]: [&Var; 3],
    attention: &AttentionConfig,
) -> Step<'static> {
    let parameters = [("q", q), ("k", k), ("v", v)];
    let parameters = parameters.map(|(name, x)| (name.to_string(), x.clone()));
    let ([q, k, v], attention) = ([q, k, v].map(Var::clone), attention.clone());
    let (device, config) = (q.device().clone(), StepConfig::default());
    let step = Step::without_optimizer(&device, parameters.into(), &config, move |_| {
        algorithm.attend(&q, &k, &v, &attention)
    });
    step.unwrap()
}

/// Runs forward and backward; returns the output and the gradients of q, k and v.
pub fn run(planned: &mut Step, d_out: &Tensor) -> [Tensor; 4] {
    planned
        .forward_backward_from(Batch::new([]), d_out)
        .unwrap();
    let gradients = planned.gradients().unwrap().into_iter();
    let gradients = gradients.map(|(_, gradient)| gradient);
    let all: Vec<Tensor> = [planned.output().unwrap()]
        .into_iter()
        .chain(gradients)
        .collect();
    all.try_into().unwrap()
}

/// Plans self-attention alone, without running it.
pub fn plan_alone(
    target: impl Into<Target>,
    algorithm: Algorithm,
    shape: impl Into<Shape>,
    dtype: DType,
    attention: &AttentionConfig,
) -> tallow::Result<Plan> {
    let (shape, weights) = (shape.into(), graph::weights(dtype));
    let [q, k, v] = ["q", "k", "v"].map(|name| weights.get(shape.clone(), name).unwrap());
    let (kind, config) = (PlanKind::Gradients, StepConfig::default());
    Step::plan_for(target, kind, &config, Batch::new([]), |_| {
        algorithm.attend(&q, &k, &v, attention)
    })
}

/// Calls [`plan_alone`] for naive attention on the CPU.
pub fn naive_plan(shape: impl Into<Shape>, dtype: DType, attention: &AttentionConfig) -> Plan {
    plan_alone(&CPU, Algorithm::Naive, shape, dtype, attention).unwrap()
}

/// Returns q, k, v and d_out of this shape, always the same.
fn inputs(shape: &[usize]) -> [Tensor; 4] {
    let n: usize = shape.iter().product();
    let wave = |phase: f64| -> Vec<f32> {
        let value =
            |i: usize| ((i as f64 * 0.731 + phase).sin() * 3.1 + (i as f64 * 0.017).cos()) as f32;
        (0..n).map(value).collect()
    };
    [0.0, 1.0, 2.0, 3.0].map(|phase| Tensor::from_vec(wave(phase), shape, &CPU).unwrap())
}

/// Compares output and gradients of planned attention with those of eager naive attention.
fn agree(shape: &[usize], config: &AttentionConfig) {
    let [q, k, v, d_out] = inputs(shape);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let out = attention::naive(&q, &k, &v, config).unwrap();
    let loss = (&out * &d_out).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    let mut planned = planned(Algorithm::Naive, [&q, &k, &v], config);
    for turn in 0..2 {
        let [planned_out, gradients @ ..] = run(&mut planned, &d_out);
        let error = distance(&planned_out, &out);
        assert!(
            error <= 1e-6,
            "{shape:?} {config:?} run {turn}: {error:.1e}"
        );
        for ((got, var), name) in gradients.iter().zip([&q, &k, &v]).zip(["dq", "dk", "dv"]) {
            let wanted = store.get(var).unwrap();
            // With one key the probability is 1 and these gradients are 0; both sides compute only rounding errors.
            let gone = shape[shape.len() - 2] == 1 && name != "dv";
            let error = match gone {
                true => got
                    .abs()
                    .unwrap()
                    .max_all()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap()
                    .into(),
                false => distance(got, wanted),
            };
            assert!(error <= 5e-6, "{shape:?} {config:?} {name}: {error:.1e}");
        }
    }
}

#[rstest]
fn as_eager(
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
    #[values(
        &[1, 1], &[123, 24], &[2, 3, 64, 16], &[1, 5, 257, 40], &[8, 1, 300, 80], &[3, 2, 2, 65, 7],
        &[1, 1, 2100, 16],
    )]
    shape: &[usize],
) {
    agree(shape, &with_mask(mask));
}

/// Planned flash attention has the bits of eager flash attention, which runs the same kernel.
#[rstest]
fn flash_has_eager_flashs_bits(
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values((1, 1, 1), (2, 123, 24), (3, 257, 64), (8, 130, 256))] (heads, length, head_dim): (
        usize,
        usize,
        usize,
    ),
) {
    let shape = [heads, 1, length, head_dim];
    flash_as_eager(&shape, head_dim, dtype, &with_mask(mask), &CPU);
}

#[rstest]
fn flash_with_values_of_another_width(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values((24, 64), (192, 128))] (head_dim, value_dim): (usize, usize),
) {
    let shape = [2, 3, 130, head_dim];
    flash_as_eager(&shape, value_dim, dtype, &with_mask(Mask::Causal), &CPU);
}

/// Checks that output and gradients of three planned runs and of an eager one have the same bits, for q and k of this
/// shape and values of width `value_dim`.
pub fn flash_as_eager(
    shape: &[usize],
    value_dim: usize,
    dtype: DType,
    config: &AttentionConfig,
    device: &Device,
) {
    let there = |x: &Tensor| x.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let [q, k, ..] = inputs(shape).map(|x| there(&x));
    let of_values = [&shape[..shape.len() - 1], &[value_dim]].concat();
    let [.., v, d_out] = inputs(&of_values).map(|x| there(&x));
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let out = attention::flash(&q, &k, &v, config).unwrap();
    let loss = (&out * &d_out).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    let mut planned = planned(Algorithm::Flash, [&q, &k, &v], config);
    for turn in 0..3 {
        let found = run(&mut planned, &d_out);
        let wanted = [&q, &k, &v].map(|x| store.get(x).unwrap());
        let wanted = [&out].into_iter().chain(wanted);
        for ((found, wanted), name) in found.iter().zip(wanted).zip(["out", "dq", "dk", "dv"]) {
            let [found, wanted] = [found, wanted].map(|x| elements(&x.to_device(&CPU).unwrap()));
            assert!(
                found == wanted,
                "{shape:?} {dtype:?} {config:?} {name}, run {turn}"
            );
        }
    }
}

#[test]
fn other_lengths_and_grouped_heads() {
    with_others(&CPU);
}

/// Checks cross-attention and grouped heads: output, gradients and log-sum-exp against eager ones.
pub fn with_others(device: &Device) {
    for (algorithm, kv_heads) in [
        (Algorithm::Naive, 6),
        (Algorithm::Naive, 2),
        (Algorithm::Flash, 2),
    ] {
        let attention = with_mask(Mask::CausalEnd);
        let (queries, keys) = ([2, 6, 50, 16], [2, kv_heads, 70, 16]);
        let there = |x: &Tensor| x.to_device(device).unwrap();
        let [q, _, _, d_out] = inputs(&queries).map(|x| there(&x));
        let [_, k, v, _] = inputs(&keys).map(|x| there(&x));
        let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
        let out = algorithm.attend(&q, &k, &v, &attention).unwrap();
        let loss = (&out * &d_out).unwrap().sum_all().unwrap();
        let store = loss.backward().unwrap();

        let mut planned = planned(algorithm, [&q, &k, &v], &attention);
        for _ in 0..2 {
            let [planned_out, gradients @ ..] = run(&mut planned, &d_out);
            let error = distance(&planned_out, &out);
            assert!(error <= 1e-6, "{algorithm:?}: {error:.1e}");
            for (found, var) in gradients.iter().zip([&q, &k, &v]) {
                assert_eq!(found.dims(), var.dims());
                let error = distance(found, store.get(var).unwrap());
                assert!(error <= 5e-6, "{algorithm:?}: {error:.1e}");
            }
        }
        if algorithm == Algorithm::Flash {
            let (_, lse) = attention::flash_with_lse(&q, &k, &v, &attention).unwrap();
            let parameters = [("q", &q), ("k", &k), ("v", &v)];
            let parameters = parameters.map(|(name, x)| (name.to_string(), x.clone()));
            let (parameters, config) = (parameters.into(), StepConfig::default());
            let mut step = Step::without_optimizer(device, parameters, &config, |_| {
                Ok(attention::flash_with_lse(&q, &k, &v, &attention)?.1)
            });
            let found = step.as_mut().unwrap().forward(Batch::new([])).unwrap();
            assert_eq!(found.dims(), [2, 6, 50]);
            assert_eq!(elements(&on_cpu(&found)), elements(&on_cpu(&lse)));
        }
    }
}

fn on_cpu(x: &Tensor) -> Tensor {
    x.to_device(&CPU).unwrap()
}

#[test]
fn flash_keeps_nothing_of_all_pairs() {
    let shape = (4, 2, 500, 64);
    let config = with_mask(Mask::Causal);
    let plan = |dtype| plan_alone(&CPU, Algorithm::Flash, shape, dtype, &config).unwrap();
    let (n, rows) = (8 * 500 * 64, 8 * 500);
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT_BYTES);
    let single = plan(DType::F32);
    assert_eq!(single.flops(), 3.0 * 4.0 * 8.0 * 500.0 * 500.0 * 64.0);
    // out, dq, dk, dv, and lse with its remainder, are live together.
    assert_eq!(single.arena_bytes(), aligned(2 * 4 * rows) + 4 * 4 * n);
    assert!(single.explain().contains("flash_attention_backward"));
    let half = plan(DType::BF16);
    assert_eq!(half.arena_bytes(), aligned(4 * rows) + 2 * 5 * n);
    let error = plan_alone(&CPU, Algorithm::Flash, (2, 10, 257), DType::F32, &config);
    refusal(error.map(|_| ()), &["256", "257"]);
}

#[test]
fn any_scale() {
    for scale in [-0.7, 0.0, 2.5] {
        let scale = Some(scale);
        let mask = Mask::Causal;
        let [q, k, v, _] = inputs(&[2, 50, 12]).map(|x| Var::from_tensor(&x).unwrap());
        let config = AttentionConfig {
            mask,
            scale,
            ..Default::default()
        };
        let wanted = attention::naive(&q, &k, &v, &config).unwrap();
        let mut planned = planned(Algorithm::Naive, [&q, &k, &v], &config);
        let error = distance(&planned.forward(Batch::new([])).unwrap(), &wanted);
        assert!(error <= 1e-6, "{scale:?}: {error:.1e}");
    }
}

#[rstest]
fn same_bits_on_any_number_of_threads(
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
    #[values(&[1, 1, 1100, 24], &[5, 3, 130, 32])] shape: &[usize],
) {
    let [q, k, v, d_out] = inputs(shape);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let bits_of = |planning: usize, running: usize| -> Vec<Vec<u32>> {
        let pool = |threads| {
            ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
        };
        let mut planned = planned(Algorithm::Naive, [&q, &k, &v], &with_mask(mask));
        pool(planning).install(|| run(&mut planned, &d_out)); // planned in this pool
        pool(running).install(|| {
            let all = run(&mut planned, &d_out).map(|x| {
                let x: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
                x.into_iter().map(f32::to_bits).collect()
            });
            all.into()
        })
    };
    let alone = bits_of(1, 1);
    for (planning, running) in [(2, 2), (3, 3), (8, 8), (2, 5), (4, 1)] {
        assert!(
            bits_of(planning, running) == alone,
            "{planning} and {running}"
        );
    }
}

#[test]
fn what_is_refused() {
    let [q, k, v, d_out] = inputs(&[2, 10, 8]);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let mut planned = planned(Algorithm::Naive, [&q, &k, &v], &with_mask(Mask::Full));
    let none = || Batch::new([]);
    refusal(planned.output().map(drop), &["call run first"]);
    let [longer, ..] = inputs(&[2, 11, 8]);
    let words = ["d_output [2, 10, 8] in f32", "[2, 11, 8]"];
    refusal(planned.forward_backward_from(none(), &longer), &words);
    let double = d_out.to_dtype(DType::F64).unwrap();
    let words = ["d_output [2, 10, 8] in f32", "f64"];
    refusal(planned.forward_backward_from(none(), &double), &words);
    let words = ["a scalar f32", "[2, 10, 8] in f32"];
    refusal(planned.forward_backward(none()).map(drop), &words);
    planned.forward_backward_from(none(), &d_out).unwrap();
    assert_eq!(planned.gradients().unwrap().len(), 3);
    // Output and gradients are those of the last run; without backward there are none.
    planned.forward(none()).unwrap();
    refusal(planned.output().map(drop), &["no output"]);
    refusal(planned.gradients().map(drop), &["left no gradients"]);
    // A strided gradient with an offset is read correctly.
    let [wide, ..] = inputs(&[2, 11, 8]);
    let part = wide.narrow(1, 1, 10).unwrap();
    let found = run(&mut planned, &part);
    let wanted = run(&mut planned, &part.force_contiguous().unwrap());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(elements(found), elements(wanted));
    }
    // A parameter passed as the gradient is copied first.
    let found = run(&mut planned, &q);
    let wanted = run(&mut planned, &q.copy().unwrap());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(elements(found), elements(wanted));
    }
}

#[test]
fn the_plan_says_what_it_is() {
    let shape = (4, 2, 500, 64);
    let plan = naive_plan(shape, DType::F32, &with_mask(Mask::Full));
    let n = 4 * 8 * 500 * 64;
    assert_eq!(plan.flops(), 3.0 * 4.0 * 8.0 * 500.0 * 500.0 * 64.0);
    assert_eq!(plan.category_bytes(Category::Gradient), 3 * n);
    assert_eq!(plan.category_bytes(Category::Input), n); // d_out
    assert_eq!(plan.category_bytes(Category::Parameter), 3 * n);
    assert_eq!(plan.category_bytes(Category::Activation), 4 * 8 * 500 * 500);
    assert_eq!(plan.total_bytes(), plan.arena_bytes() + 4 * n);
    let text = plan.explain();
    for wanted in ["naive_attention_backward", "mask full", "probabilities @"] {
        assert!(text.contains(wanted), "no {wanted:?} in\n{text}");
    }
    assert!(plan.memory_map().contains("probabilities"));
}

#[test]
fn memory_is_the_arena() {
    if child::ran("compile::attention::memory_is_the_arena") {
        return;
    }
    let [q, k, v, d_out] = inputs(&[8, 1, 700, 64]);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let alive = || tracker::current_bytes().expect("the suite's allocator counts");
    rayon::broadcast(|_| ()); // starts the process's thread pool
    tracker::reset_peak();
    let before = alive();
    let mut planned = planned(Algorithm::Naive, [&q, &k, &v], &with_mask(Mask::Full));
    let run = |planned: &mut Step| {
        planned
            .forward_backward_from(Batch::new([]), &d_out)
            .unwrap()
    };
    run(&mut planned);
    let beside = alive() - before - planned.plan().unwrap().arena_bytes();
    assert!(beside < 32 << 10, "{beside} bytes beside the arena");
    let mut step = || run(&mut planned);
    let settled = alive();
    tracker::reset_peak();
    (0..3).for_each(|_| step());
    assert_eq!(alive(), settled);
    // The kernels' scratch, argument lists, and the pool's task queue.
    let workload = AttentionWorkload {
        sequence_length: 700,
        ..Default::default()
    };
    let predicted = planned_attention_breakdown(&workload, Target::Cpu).unwrap();
    let own = predicted.terms.iter();
    let own = own.filter(|part| part.name.starts_with("scratch of the kernel"));
    let own: u64 = own.map(|part| part.bytes).sum();
    let transient = tracker::peak_bytes().unwrap() - settled;
    assert!(
        own > 0 && transient < own + (16 << 10),
        "{transient} of {own}"
    );
}
