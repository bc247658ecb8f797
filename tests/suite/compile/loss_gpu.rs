//! Steps of custom losses planned on a GPU against the same steps planned on the CPU.

use super::loss_step::{
    Case, elementwise_ops, every_op, fused_in_segments, ignoring_head, meta, ops_of_other_models,
    parts, recomputed_outputs,
};
use super::{CPU, distance};
use candle_core::{Device, Tensor, Var};
use rstest::rstest;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;

/// The losses of some steps, the first step's gradients, and the weights after the last step.
struct Trained {
    losses: Vec<f32>,
    gradients: Vec<Tensor>,
    weights: Vec<Tensor>,
}

fn train(case: &Case, precision: Precision, device: &Device, steps: usize) -> Trained {
    train_on(case, precision, device, steps, 1)
}

/// Trains with each input repeated `accumulation` times, in that number of micro-batches.
fn train_on(
    case: &Case,
    precision: Precision,
    device: &Device,
    steps: usize,
    accumulation: usize,
) -> Trained {
    let on = |x: &Tensor| x.copy().unwrap().to_device(device).unwrap();
    let parameters = case.parameters.iter();
    let parameters = parameters.map(|(name, var)| {
        let var = Var::from_tensor(&on(var)).unwrap();
        (name.clone(), var)
    });
    let parameters: Vec<(String, Var)> = parameters.collect();
    let weights: Vec<Var> = parameters.iter().map(|(_, var)| var.clone()).collect();
    let repeated = |x: &Tensor| Tensor::cat(&vec![x; accumulation], 0).unwrap();
    let inputs = case.inputs.iter();
    let inputs: Vec<_> = inputs.map(|(name, x)| (*name, on(&repeated(x)))).collect();
    let inputs: Vec<_> = inputs.iter().map(|(name, x)| (*name, x)).collect();
    let mut optimizer = Optimizer::new(parameters, AdamWConfig::default()).unwrap();
    let config = StepConfig {
        clip_norm: Some(1.0),
        accumulation,
        precision,
        ..Default::default()
    };
    let loss = |given: &Inputs| (case.loss)(&weights, &meta(given, &case.inputs)?);
    let mut step = Step::new(&optimizer, &config, loss).unwrap();
    let mut losses = vec![step.forward_backward(inputs.as_slice()).unwrap()];
    let found = step.gradients().unwrap();
    let gradient = |(name, _): &(String, Var)| {
        let (_, gradient) = found.iter().find(|(other, _)| other == name).unwrap();
        gradient.to_device(&CPU).unwrap()
    };
    let gradients = case.parameters.iter().map(gradient).collect();
    losses.extend((1..steps).map(|_| step.run(&mut optimizer, inputs.as_slice()).unwrap()));
    let on_cpu = |var: &Var| var.to_device(&CPU).unwrap();
    Trained {
        losses,
        gradients,
        weights: weights.iter().map(on_cpu).collect(),
    }
}

/// Returns the largest distance of a gradient of b from that of a, relative to its norm.
fn furthest(a: &Trained, b: &Trained) -> f64 {
    let pairs = a.gradients.iter().zip(&b.gradients);
    let distances = pairs.map(|(a, b)| distance(b, a));
    distances.fold(0.0, f64::max)
}

/// In f32 only the order of sums may differ. In half precision the error against f32 may be three times that of the
/// CPU's own step. Repetitions have the same bits, launched call by call or replayed from a graph.
#[rstest]
#[ignore = "needs a CUDA device"]
fn losses_are_those_of_the_cpu(
    #[values(
        every_op,
        ops_of_other_models,
        elementwise_ops,
        ignoring_head,
        parts,
        recomputed_outputs,
        fused_in_segments
    )]
    case: fn() -> Case,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let gpu = crate::gpu();
    let case = case();
    let [got, again] = [0, 1].map(|_| train(&case, precision, &gpu, 5));
    assert_eq!(got.losses, again.losses);
    for (a, b) in got.weights.iter().zip(&again.weights) {
        assert_eq!(distance(a, b), 0.0);
    }
    let exact = train(&case, Precision::F32, &CPU, 5);
    let judge = train(&case, precision, &CPU, 5);
    let (allowed, allowed_loss) = match precision {
        Precision::F32 => ((10.0 * case.bound).min(2e-2), 2.0 * case.bound),
        _ => (3.0 * furthest(&exact, &judge).max(2f64.powi(-8)), 2e-2),
    };
    let error = furthest(&exact, &got);
    assert!(error <= allowed, "{error}, allowed {allowed}");
    let losses = got.losses.iter().zip(&judge.losses);
    for (i, (got, wanted)) in losses.enumerate() {
        let error = f64::from((got - wanted).abs() / wanted.abs());
        // After the first step, rounding may have flipped the sign of a small gradient.
        let allowed = if i == 0 {
            allowed_loss
        } else {
            10.0 * allowed_loss
        };
        assert!(error <= allowed, "step {i}: {got} for {wanted}");
    }
}

/// The mean over equal micro-batches is the result of one of them.
#[rstest]
#[ignore = "needs a CUDA device"]
fn micro_batches(#[values(every_op, ignoring_head, parts)] case: fn() -> Case) {
    let (gpu, case) = (crate::gpu(), case());
    let [whole, mean] = [1, 3].map(|n| train_on(&case, Precision::F32, &gpu, 3, n));
    for (got, wanted) in mean.losses.iter().zip(&whole.losses) {
        let error = f64::from((got - wanted).abs() / wanted.abs());
        assert!(error <= 2e-5, "{got} for {wanted}");
    }
    let (error, allowed) = (furthest(&whole, &mean), 2.0 * case.bound);
    assert!(error <= allowed, "{error}, allowed {allowed}");
}
