//! FLOPs and bytes by formula.

use super::{BATCH, LENGTH, STEPS, config, exclusive, record};
use candle_core::{Device, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::model::{TransformerLM, flops};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::profile::{Grouping, ProfileReport, Profiler, Selection};

#[rstest]
fn products_are_the_models(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let recording = record(attention, precision);
    let products = |phase: &str| {
        let spans = recording.spans.iter().filter(|span| span.phase == phase);
        let costs = spans.filter_map(|span| span.cost());
        costs.map(|cost| cost.matmul_flops).sum::<f64>() / STEPS as f64
    };
    let config = config();
    assert_eq!(
        products("forward"),
        flops::forward(&config, BATCH, LENGTH).total()
    );
    assert_eq!(
        products("backward"),
        flops::backward(&config, BATCH, LENGTH).total()
    );
    assert_eq!(products("optimizer"), 0.0);
}

/// The gradients of head and loss belong to backward, although a planned step computes them next to the loss.
#[test]
fn a_planned_step_has_the_matmuls_of_an_eager_one() {
    let _lock = exclusive();
    let model = TransformerLM::new(&config(), 5, &Device::Cpu).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let tokens: Vec<u32> = (0..(BATCH * LENGTH) as u32).collect();
    let tokens = Tensor::from_vec(tokens, (BATCH, LENGTH), &Device::Cpu).unwrap();
    let profiler = Profiler::start_on_this_thread().unwrap();
    step.run(&mut optimizer, (&tokens, &tokens)).unwrap();
    let recording = profiler.finish().unwrap();
    let flops = |phase: &str| {
        let spans = recording.spans.iter().filter(|span| span.phase == phase);
        spans
            .filter_map(|span| span.cost())
            .map(|cost| cost.matmul_flops)
            .sum::<f64>()
    };
    let expected = [flops::forward, flops::backward].map(|of| of(&config(), BATCH, LENGTH).total());
    assert_eq!(["forward", "backward"].map(flops), expected);
}

#[rstest]
fn every_op_of_a_step_has_a_formula(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let recording = record(attention, precision);
    let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Name).unwrap();
    for row in report.rows.iter().filter(|row| row.kind.is_some()) {
        let cost = row
            .cost
            .unwrap_or_else(|| panic!("no formula for {}", row.name));
        assert!(cost.bytes() > 0.0, "{}", row.name);
        assert!(row.bytes_per_s().is_some(), "{}", row.name);
    }
}

/// By hand, from the shapes: N = 14, D = 12, F = 20, V = 19, H = 2, T = 7.
#[test]
fn bytes_are_those_of_the_shapes() {
    let of = |precision| {
        let recording = record(Algorithm::Naive, precision);
        let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Name).unwrap();
        move |name: &str| {
            let row = report.rows.iter().find(|row| row.name == name).unwrap();
            let (cost, calls) = (row.cost.unwrap(), row.instances as f64);
            (cost.read_bytes / calls, cost.written_bytes / calls)
        }
    };
    let f32 = of(Precision::F32);
    let (n, d, f, v) = (14.0, 12.0, 20.0, 19.0);
    let activation = 4.0 * n * d;
    assert_eq!(f32("add"), (2.0 * activation, activation));
    assert_eq!(f32("rms_norm"), (activation + 4.0 * d, activation));
    let probabilities = 4.0 * (2 * 2 * 7 * 7) as f64;
    let attention = (3.0 * activation, activation + probabilities);
    assert_eq!(f32("attention::naive"), attention);
    let swiglu = (activation + 8.0 * d * f, 12.0 * n * f);
    assert_eq!(f32("swiglu_linear"), swiglu);
    let head = activation + 4.0 * d * v;
    assert_eq!(f32("linear_cross_entropy"), (head, 4.0 * n * v));
    assert_eq!(
        f32("linear_cross_entropy backward"),
        (head + 4.0 * n * v, head)
    );
    let parameters = config().num_parameters() as f64;
    assert_eq!(f32("adamw"), (16.0 * parameters, 12.0 * parameters));
    assert_eq!(f32("clip_grad_norm"), (8.0 * parameters, 4.0 * parameters));

    // Activations in half precision, probabilities in f32, and the head's logits in half precision although its loss is
    // f32.
    let bf16 = of(Precision::BF16);
    let half = (1.5 * activation, 0.5 * activation + probabilities);
    assert_eq!(bf16("attention::naive"), half);
    assert_eq!(bf16("linear_cross_entropy"), (0.5 * head, 2.0 * n * v));
    // Matmuls read half precision, and the weight's gradient is f32.
    let read = 0.5 * head + 2.0 * n * v;
    let written = 0.5 * activation + 4.0 * d * v;
    assert_eq!(bf16("linear_cross_entropy backward"), (read, written));
    assert_eq!(bf16("adamw"), (16.0 * parameters, 12.0 * parameters));
}

#[test]
fn what_is_taken_apart_costs_what_it_did() {
    use tallow::ops::{KernelPolicy, with_kernel_policy};

    let flops = |policy| {
        let recording = with_kernel_policy(policy, || record(Algorithm::Naive, Precision::F32));
        let forward = Selection::phase("forward");
        let report = ProfileReport::new(&recording, &forward, Grouping::Name).unwrap();
        let sum = |names: &[&str]| {
            let rows = report.sum("", |row| names.contains(&row.name.as_str()));
            rows.cost.unwrap().flops()
        };
        (
            sum(&["attention::naive", "matmul", "softmax", "scale", "mask"]),
            sum(&[
                "swiglu_linear",
                "swiglu",
                "linear",
                "linear_cross_entropy",
                "cross_entropy",
            ]),
        )
    };
    assert_eq!(flops(KernelPolicy::Prefer), flops(KernelPolicy::Reference));
}
