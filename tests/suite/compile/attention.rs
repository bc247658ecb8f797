//! Planned attention against eager naive.

use super::{CPU, distance};
use crate::child;
use crate::flash::problem::numbers;
use candle_core::{DType, Device, Shape, Tensor, Var};
use rayon::ThreadPoolBuilder;
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, Mask};
use tallow::compile::arena::ALIGNMENT_BYTES;
use tallow::compile::{Attention, AttentionPlanConfig, Category, Plan};
use tallow::memory::tracker;

fn config(mask: Mask) -> AttentionConfig {
    AttentionConfig {
        mask,
        ..Default::default()
    }
}

/// Self-attention by an algorithm, to be planned.
pub fn planning(
    algorithm: Algorithm,
    shape: impl Into<Shape>,
    dtype: DType,
    attention: &AttentionConfig,
) -> AttentionPlanConfig {
    AttentionPlanConfig {
        algorithm,
        attention: attention.clone(),
        ..AttentionPlanConfig::new(shape, dtype)
    }
}

/// Naive self-attention on the CPU.
pub fn naive(
    shape: impl Into<Shape>,
    dtype: DType,
    attention: &AttentionConfig,
) -> tallow::Result<Attention> {
    Attention::new(&CPU, &planning(Algorithm::Naive, shape, dtype, attention))
}

/// As [`naive`], the plan alone.
pub fn naive_plan(shape: impl Into<Shape>, dtype: DType, attention: &AttentionConfig) -> Plan {
    let config = planning(Algorithm::Naive, shape, dtype, attention);
    Attention::plan_for(&CPU, &config).unwrap()
}

/// q, k, v and d_out of that shape; the same seed gives the same.
fn inputs(shape: &[usize]) -> [Tensor; 4] {
    let n: usize = shape.iter().product();
    let wave = |phase: f64| -> Vec<f32> {
        let value =
            |i: usize| ((i as f64 * 0.731 + phase).sin() * 3.1 + (i as f64 * 0.017).cos()) as f32;
        (0..n).map(value).collect()
    };
    [0.0, 1.0, 2.0, 3.0].map(|phase| Tensor::from_vec(wave(phase), shape, &CPU).unwrap())
}

/// Output and gradients, planned and by eager naive.
fn agree(shape: &[usize], config: &AttentionConfig) {
    let [q, k, v, d_out] = inputs(shape);
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let out = attention::naive(&q, &k, &v, config).unwrap();
    let loss = (&out * &d_out).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    let mut planned = naive(shape, DType::F32, config).unwrap();
    for run in 0..2 {
        planned.forward(&q, &k, &v).unwrap();
        let error = distance(&planned.output().unwrap(), &out);
        assert!(error <= 1e-6, "{shape:?} {config:?} run {run}: {error:.1e}");
        planned.backward(&d_out).unwrap();
        let gradients = planned.gradients().unwrap();
        for ((got, var), name) in gradients.iter().zip([&q, &k, &v]).zip(["dq", "dk", "dv"]) {
            let wanted = store.get(var).unwrap();
            // One key has one probability, 1, and no gradient; what either computes is rounding.
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
    agree(shape, &config(mask));
}

/// What flash attention gives eagerly, from the same kernel.
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
    flash_as_eager(&shape, dtype, &config(mask), &CPU);
}

/// Output and gradients, planned twice and eagerly, have the same bits.
pub fn flash_as_eager(shape: &[usize], dtype: DType, config: &AttentionConfig, device: &Device) {
    let there = |x: &Tensor| x.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let [q, k, v, d_out] = inputs(shape).map(|x| there(&x));
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
    let out = attention::flash(&q, &k, &v, config).unwrap();
    let loss = (&out * &d_out).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    let mut planned =
        Attention::new(device, &planning(Algorithm::Flash, shape, dtype, config)).unwrap();
    for run in 0..3 {
        planned.forward(&q, &k, &v).unwrap();
        planned.backward(&d_out).unwrap();
        let [dq, dk, dv] = planned.gradients().unwrap();
        let found = [planned.output().unwrap(), dq, dk, dv];
        let wanted = [&q, &k, &v].map(|x| store.get(x).unwrap());
        let wanted = [&out].into_iter().chain(wanted);
        for ((found, wanted), name) in found.iter().zip(wanted).zip(["out", "dq", "dk", "dv"]) {
            let [found, wanted] = [found, wanted].map(|x| numbers(&x.to_device(&CPU).unwrap()));
            assert!(
                found == wanted,
                "{shape:?} {dtype:?} {config:?} {name}, run {run}"
            );
        }
    }
}

#[test]
fn other_lengths_and_grouped_heads() {
    with_others(&CPU);
}

/// Other keys than queries, and heads that share keys: output, gradients and log-sum-exp beside eager ones.
pub fn with_others(device: &Device) {
    for (algorithm, kv_heads) in [
        (Algorithm::Naive, 6),
        (Algorithm::Naive, 2),
        (Algorithm::Flash, 2),
    ] {
        let attention = config(Mask::CausalEnd);
        let mut config = planning(algorithm, (2, 6, 50, 16), DType::F32, &attention);
        let (queries, keys) = ([2, 6, 50, 16], [2, kv_heads, 70, 16]);
        (config.k, config.v) = (Shape::from(&keys), Shape::from(&keys));
        let there = |x: &Tensor| x.to_device(device).unwrap();
        let [q, _, _, d_out] = inputs(&queries).map(|x| there(&x));
        let [_, k, v, _] = inputs(&keys).map(|x| there(&x));
        let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
        let out = algorithm.attend(&q, &k, &v, &attention).unwrap();
        let loss = (&out * &d_out).unwrap().sum_all().unwrap();
        let store = loss.backward().unwrap();

        let mut planned = Attention::new(device, &config).unwrap();
        for _ in 0..2 {
            planned.forward(&q, &k, &v).unwrap();
            planned.backward(&d_out).unwrap();
            let error = distance(&planned.output().unwrap(), &out);
            assert!(error <= 1e-6, "{algorithm:?}: {error:.1e}");
            let gradients = planned.gradients().unwrap();
            for (found, var) in gradients.iter().zip([&q, &k, &v]) {
                assert_eq!(found.dims(), var.dims());
                let error = distance(found, store.get(var).unwrap());
                assert!(error <= 5e-6, "{algorithm:?}: {error:.1e}");
            }
        }
        match algorithm {
            Algorithm::Naive => {
                let text = planned.lse().unwrap_err().to_string();
                assert!(text.contains("Algorithm::Flash"), "{text}");
            }
            Algorithm::Flash => {
                let (_, lse) = attention::flash_with_lse(&q, &k, &v, &attention).unwrap();
                let found = planned.lse().unwrap();
                assert_eq!(found.dims(), [2, 6, 50]);
                assert_eq!(numbers(&on_cpu(&found)), numbers(&on_cpu(&lse)));
            }
        }
        let text = planned.forward(&q, &q, &v).unwrap_err().to_string();
        assert!(text.contains("k [2"), "{text}");
    }
}

fn on_cpu(x: &Tensor) -> Tensor {
    x.to_device(&CPU).unwrap()
}

#[test]
fn flash_keeps_nothing_of_all_pairs() {
    let shape = (4, 2, 500, 64);
    let config = config(Mask::Causal);
    let plan = |dtype| {
        let plan = Attention::plan_for(&CPU, &planning(Algorithm::Flash, shape, dtype, &config));
        plan.unwrap()
    };
    let (n, rows) = (8 * 500 * 64, 8 * 500);
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT_BYTES);
    let single = plan(DType::F32);
    assert_eq!(single.flops(), 3.0 * 4.0 * 8.0 * 500.0 * 500.0 * 64.0);
    // out, dq, dk, dv and lse with its rest, there at once.
    assert_eq!(single.peak_bytes(), aligned(2 * 4 * rows) + 4 * 4 * n);
    assert!(single.explain().contains("flash_attention_backward"));
    let half = plan(DType::BF16);
    assert_eq!(half.peak_bytes(), aligned(4 * rows) + 2 * 5 * n);
    let error = Attention::plan_for(
        &CPU,
        &planning(Algorithm::Flash, (2, 10, 257), DType::F32, &config),
    );
    let text = error.map(|_| ()).unwrap_err().to_string();
    let many = (1usize << 50, 1, 1); // whose workspace on a GPU is larger than they are
    let beyond = Attention::plan_for(&CPU, &planning(Algorithm::Flash, many, DType::F32, &config));
    let beyond = beyond.map(|_| ()).unwrap_err().to_string();
    assert!(beyond.contains("planned attention"), "{beyond}");
    for word in ["at most 256", "[2, 10, 257]", "plan naive"] {
        assert!(text.contains(word), "no {word:?} in {text:?}");
    }
}

#[test]
fn any_scale() {
    for scale in [-0.7, 0.0, 2.5] {
        let scale = Some(scale);
        let mask = Mask::Causal;
        let [q, k, v, _] = inputs(&[2, 50, 12]);
        let config = AttentionConfig {
            mask,
            scale,
            ..Default::default()
        };
        let wanted = attention::naive(&q, &k, &v, &config).unwrap();
        let mut planned = naive((2, 50, 12), DType::F32, &config).unwrap();
        planned.forward(&q, &k, &v).unwrap();
        let error = distance(&planned.output().unwrap(), &wanted);
        assert!(error <= 1e-6, "{scale:?}: {error:.1e}");
    }
}

#[rstest]
fn same_bits_on_any_number_of_threads(
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
    #[values(&[1, 1, 1100, 24], &[5, 3, 130, 32])] shape: &[usize],
) {
    let [q, k, v, d_out] = inputs(shape);
    let run = |planning: usize, running: usize| -> Vec<Vec<u32>> {
        let pool = |threads| {
            ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
        };
        let mut planned = pool(planning)
            .install(|| naive(shape, DType::F32, &config(mask)))
            .unwrap();
        pool(running).install(|| {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            planned.forward(&q, &k, &v).unwrap();
            planned.backward(&d_out).unwrap();
            let mut all = vec![bits(planned.output_values().unwrap())];
            all.extend(planned.gradient_values().unwrap().map(bits));
            all
        })
    };
    let alone = run(1, 1);
    for (planning, running) in [(2, 2), (3, 3), (8, 8), (2, 5), (4, 1)] {
        assert!(run(planning, running) == alone, "{planning} and {running}");
    }
}

#[test]
fn what_is_not_planned_for() {
    let config = config(Mask::Full);
    let refused = |result: tallow::Result<()>, words: &[&str]| {
        let text = result.unwrap_err().to_string();
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text:?}");
        }
    };
    for (shape, got) in [
        (vec![], "[]"),
        (vec![5], "[5]"),
        (vec![2, 0, 4], "[2, 0, 4]"),
    ] {
        refused(
            naive(shape, DType::F32, &config).map(|_| ()),
            &["(..., T, Dh)", got],
        );
    }
    for huge in [&[1 << 20, 1 << 30, 64][..], &[1 << 40, 1 << 40, 1, 1]] {
        refused(
            naive(huge, DType::F32, &config).map(|_| ()),
            &["planned attention"],
        );
    }
    let large = naive((64, 1 << 19, 64), DType::F32, &config);
    refused(large.map(|_| ()), &["arena"]);

    let mut planned = naive((2, 10, 8), DType::F32, &config).unwrap();
    let [q, k, v, d_out] = inputs(&[2, 10, 8]);
    refused(planned.backward(&d_out), &["backward without a forward"]);
    refused(planned.output().map(|_| ()), &["call forward first"]);
    refused(
        planned.output_values::<f32>().map(|_| ()),
        &["call forward first"],
    );
    let [longer, ..] = inputs(&[2, 11, 8]);
    let words = ["[2, 10, 8], as planned", "[2, 11, 8]", "plan another"];
    refused(planned.forward(&q, &longer, &v), &words);
    let double = v.to_dtype(DType::F64).unwrap();
    refused(
        planned.forward(&q, &k, &double),
        &["v in f32, as planned", "f64"],
    );
    refused(
        naive((2, 10, 8), DType::F64, &config).map(|_| ()),
        &["f32, bf16 or f16", "f64"],
    );
    let [turned, ..] = inputs(&[2, 8, 10]);
    let turned = turned.transpose(1, 2).unwrap();
    refused(
        planned.forward(&turned, &k, &v),
        &["q contiguous", "contiguous()?"],
    );
    planned.forward(&q, &k, &v).unwrap();
    refused(
        planned.output_values::<half::f16>().map(|_| ()),
        &["in f32, as planned", "f16"],
    );
    refused(planned.gradients().map(|_| ()), &["call backward first"]);
    refused(
        planned.gradient_values::<f32>().map(|_| ()),
        &["call backward first"],
    );
    refused(planned.backward(&longer), &["d_out [2, 10, 8]"]);
    planned.backward(&d_out).unwrap();
    planned.gradients().unwrap();
    // Gradients are of the last forward, or of none.
    planned.forward(&q, &k, &v).unwrap();
    refused(planned.gradients().map(|_| ()), &["call backward first"]);
}

#[test]
fn the_plan_says_what_it_is() {
    let shape = (4, 2, 500, 64);
    let plan = naive_plan(shape, DType::F32, &config(Mask::Full));
    let n = 4 * 8 * 500 * 64;
    assert_eq!(plan.flops(), 3.0 * 4.0 * 8.0 * 500.0 * 500.0 * 64.0);
    assert_eq!(plan.category_bytes(Category::Gradient), 3 * n);
    assert_eq!(plan.category_bytes(Category::Input), 4 * n);
    // 500 keys are 512 and a cache line; a number for each row, up to where the next buffer may begin.
    let inv_row_sum = (4u64 * 8 * 500).next_multiple_of(ALIGNMENT_BYTES);
    assert_eq!(
        plan.category_bytes(Category::Activation),
        4 * 8 * 500 * 528 + inv_row_sum
    );
    assert_eq!(plan.total_bytes(), plan.peak_bytes() + 4 * n);
    let text = plan.explain();
    for wanted in [
        "head_attention_backward",
        "BH 8, T 500, Dh 64, mask full",
        "exponentials @",
    ] {
        assert!(text.contains(wanted), "no {wanted:?} in\n{text}");
    }
    assert!(plan.memory_map().contains("exponentials"));
    let causal = naive_plan(shape, DType::F32, &config(Mask::Causal));
    let kept = |plan: &tallow::compile::Plan| plan.category_bytes(Category::Activation) as f64;
    assert!(kept(&causal) < 0.6 * kept(&plan));
}

/// Alone in their process, since the counts are the process's.
#[test]
fn the_arena_is_all_there_is() {
    if child::ran("compile::attention::the_arena_is_all_there_is") {
        return;
    }
    let [q, k, v, d_out] = inputs(&[8, 1, 700, 64]);
    let alive = || tracker::current_bytes().expect("the suite's allocator counts");
    rayon::broadcast(|_| ()); // the pool is the process's
    tracker::reset_peak();
    let before = alive();
    let mut planned = naive((8, 1, 700, 64), DType::F32, &config(Mask::Full)).unwrap();
    let beside = alive() - before - planned.plan().peak_bytes();
    assert!(beside < 16 << 10, "{beside} bytes beside the arena");
    let mut step = || {
        planned.forward(&q, &k, &v).unwrap();
        planned.backward(&d_out).unwrap();
    };
    step();
    let settled = alive();
    tracker::reset_peak();
    (0..3).for_each(|_| step());
    assert_eq!(alive(), settled);
    // Lists of arguments, and what the pool hands tasks over with.
    let transient = tracker::peak_bytes().unwrap() - settled;
    assert!(transient < 16 << 10, "{transient} bytes came and went");
}
