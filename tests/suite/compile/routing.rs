//! Selections by masks and indices, and mixtures of experts: planned as eager, and differentiated in f64.

use super::distance;
use super::loss_step::{assert_as_eager, numbers, weight};
use crate::check::{elements, refusal};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::Mask;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::graph::{self, Target};
use tallow::nn::checkpoint;
use tallow::ops::{self, BceWeights, CrossEntropyConfig, Gelu, KlTarget, Reduction};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::{Result, profile};

const DEVICE: &Device = &Device::Cpu;

/// N tokens of width D; E experts of hidden width F, of which each token chooses K.
const N: usize = 12;
const D: usize = 6;
const E: usize = 4;
const F: usize = 10;
const K: usize = 2;

/// Returns the weights (N, E) of the experts that each token chooses, which sum to 1; 0 for the others.
fn weights(x: &Tensor, router: &Tensor) -> Result<Tensor> {
    let scores = ops::softmax(&ops::linear(x, router)?, 1.0, Mask::Full)?;
    let (_, experts) = ops::topk(&scores, K)?; // (N, K)
    let chosen = ops::sum_over(&ops::one_hot(&experts, router.dim(0)?, x.dtype())?, 1)?;
    let weights = ops::mul(&scores, &chosen)?;
    ops::div(&weights, &ops::sum_keepdim(&weights, 1)?)
}

/// Every expert computes every token: x, router, w1 (E, F, D), w2 (E, D, F).
fn dense([x, router, w1, w2]: [&Tensor; 4]) -> Result<Tensor> {
    let weights = weights(x, router)?;
    let mut y = x.clone();
    for expert in 0..router.dim(0)? {
        let of = |w: &Tensor| Result::Ok(w.narrow(0, expert, 1)?.squeeze(0)?);
        let h = ops::gelu(&ops::linear(x, &of(w1)?)?, Gelu::Tanh)?;
        let h = ops::linear(&h, &of(w2)?)?;
        y = ops::add(&y, &ops::mul(&h, &weights.narrow(1, expert, 1)?)?)?;
    }
    Ok(y)
}

/// Each expert computes the `capacity` tokens with the largest weights.
fn routed([x, router, w1, w2]: [&Tensor; 4], capacity: usize) -> Result<Tensor> {
    let weights = weights(x, router)?;
    let (gates, tokens) = ops::topk(&weights.t()?, capacity)?; // (E, C)
    let tokens = tokens.flatten_all()?;
    let (experts, width) = router.dims2()?;
    let rows = ops::index_select(x, 0, &tokens)?.reshape((experts, capacity, width))?;
    let h = ops::gelu(&ops::matmul_transposed(&rows, w1)?, Gelu::Tanh)?;
    let h = ops::mul(&ops::matmul_transposed(&h, w2)?, &gates.unsqueeze(2)?)?;
    ops::index_add(x, 0, &tokens, &h.reshape((experts * capacity, width))?)
}

/// How a mixture is computed.
#[derive(Clone, Copy, Debug)]
pub enum How {
    Dense,
    Routed(usize),
    Checkpointed,
}

fn mixture(how: How, x: [&Tensor; 4]) -> Result<Tensor> {
    match how {
        How::Dense => dense(x),
        How::Routed(capacity) => routed(x, capacity),
        How::Checkpointed => checkpoint(|x| routed(x, 4), x),
    }
}

/// Returns the loss of x, the router and both weights of the experts.
pub fn loss(how: How, x: [&Tensor; 4]) -> Result<Tensor> {
    let y = mixture(how, x)?;
    ops::mean(&ops::mul(&y, &y)?)
}

fn parameters() -> Vec<(String, Var)> {
    vec![
        weight("router", &[E, D], 1),
        weight("w1", &[E, F, D], 2),
        weight("w2", &[E, D, F], 3),
    ]
}

#[rstest]
fn a_mixture_of_experts_trains_as_eagerly(
    #[values(How::Dense, How::Routed(N), How::Routed(4), How::Checkpointed)] how: How,
) {
    let parameters = parameters();
    let inputs = [("x", numbers(&[N, D], 4))];
    let of = |i: usize| parameters[i].1.as_tensor();
    let loss = |x: &[Tensor]| loss(how, [&x[0], of(0), of(1), of(2)]);
    assert_as_eager(&parameters, &inputs, &loss, 2e-6);
}

/// With room for every token, experts that compute chosen tokens only have the result of all.
#[test]
fn routed_experts_are_the_dense_ones() {
    let [x, router] = [numbers(&[N, D], 4), numbers(&[E, D], 1)];
    let [w1, w2] = [numbers(&[E, F, D], 2), numbers(&[E, D, F], 3)];
    let operands = [&x, &router, &w1, &w2];
    let off = distance(&routed(operands, N).unwrap(), &dense(operands).unwrap());
    assert!(off <= 1e-6, "{off:e}");
    assert!(distance(&routed(operands, 2).unwrap(), &dense(operands).unwrap()) > 1e-3);
}

#[rstest]
fn gradients_of_mixtures_are_differences(#[values(How::Dense, How::Routed(4))] how: How) {
    let shapes = [&[N, D][..], &[E, D], &[E, F, D], &[E, D, F]];
    let vars = [4, 1, 2, 3].into_iter().zip(shapes);
    let vars = vars.map(|(seed, shape)| numbers(shape, seed).to_dtype(DType::F64).unwrap());
    let vars: Vec<Var> = vars.map(|x| Var::from_tensor(&x).unwrap()).collect();
    let of = |vars: &[Tensor]| loss(how, [&vars[0], &vars[1], &vars[2], &vars[3]]).unwrap();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let gradients = tallow::backward(of(&tensors)).unwrap();
    for (i, var) in vars.iter().enumerate() {
        let found = elements(gradients.get(var).unwrap());
        for element in (0..found.len()).step_by(7) {
            let at = |step: f64| {
                let mut moved = tensors.clone();
                let mut values = elements(var);
                values[element] += step;
                moved[i] = Tensor::from_vec(values, var.dims(), DEVICE).unwrap();
                of(&moved).to_scalar::<f64>().unwrap()
            };
            let step = 1e-5;
            let slope = (at(step) - at(-step)) / (2.0 * step);
            let off = (slope - found[element]).abs();
            assert!(
                off <= 1e-9,
                "{how:?} {i} {element}: {slope} {}",
                found[element]
            );
        }
    }
}

#[test]
fn a_mixture_is_traced_with_costs_for_both_devices() {
    for target in [Target::Cpu, Target::Cuda] {
        let dims = [&[N, D][..], &[E, D], &[E, F, D], &[E, D, F]];
        let names = ["x", "router", "w1", "w2"].into_iter().zip(dims);
        let x = names.map(|(name, dims)| graph::input(name, dims, DType::F32).unwrap());
        let x: Vec<Tensor> = x.collect();
        for how in [How::Dense, How::Routed(4)] {
            let graph = graph::trace(target, || loss(how, [&x[0], &x[1], &x[2], &x[3]])).unwrap();
            assert!(
                graph
                    .nodes()
                    .all(|node| !node.composed || node.op == "contiguous")
            );
            let costs = profile::node_costs(&graph);
            assert!(costs.iter().all(|cost| cost.forward.is_some()));
        }
    }
}

/// Every selection in a planned step, with masks, ids and gradients of half precision.
#[rstest]
fn selections_are_as_eager(#[values(false, true)] in_half: bool) {
    let parameters = [weight("a", &[5, 6], 1), weight("b", &[5, 6], 2)];
    let ids = Tensor::new(&[3u32, 0, 3, 4], DEVICE).unwrap();
    let inputs = [("x", numbers(&[5, 6], 3)), ("ids", ids)];
    let loss = |x: &[Tensor]| {
        let cast = |x: &Tensor| match in_half {
            true => ops::cast(x, DType::BF16),
            false => Ok(x.clone()),
        };
        let (a, b, ids) = (&cast(&parameters[0].1)?, &cast(&parameters[1].1)?, &x[1]);
        let larger = ops::gt(a, &cast(&x[0])?)?;
        let y = ops::where_cond(&larger, a, &b.narrow(0, 0, 1)?)?;
        let y = ops::masked_fill(&y, &ops::le(&x[0].narrow(0, 1, 1)?, &x[0])?, -0.25)?;
        let (top, indices) = ops::topk(&y, 3)?;
        let y = ops::add(&ops::gather(b, 1, &indices)?, &top)?; // (5, 3)
        let y = ops::scatter_add(a, 1, &indices, &y)?; // (5, 6)
        let rows = ops::index_select(&y, 0, ids)?; // (4, 6)
        let y = ops::index_add(b, 0, ids, &ops::mul(&rows, &rows)?)?;
        let firsts = ops::one_hot(&ops::argmax(&y, 1)?, 6, y.dtype())?; // (5, 6)
        let y = ops::stack(&[&y, &firsts, &ops::mul(&y, &firsts)?], 0)?;
        ops::cast(&ops::mean(&ops::mul(&y, &y)?)?, DType::F32)
    };
    let bound = if in_half { 2e-2 } else { 2e-6 };
    assert_as_eager(&parameters, &inputs, &loss, bound);
}

/// Ids that an op makes are checked by their bound when the step is planned.
#[test]
fn ids_that_an_op_makes_must_fit() {
    let parameters = [weight("table", &[5, 6], 1)];
    let x = numbers(&[3, 8], 2);
    let optimizer = Optimizer::new(parameters.to_vec(), AdamWConfig::default()).unwrap();
    let plan = |width: usize| {
        let loss = |inputs: &Inputs| {
            let best = ops::argmax(&inputs.get("x")?.narrow(1, 0, width)?, 1)?; // (3)
            ops::mean(&ops::index_select(&parameters[0].1, 0, &best)?)
        };
        let mut step = Step::new(&optimizer, &StepConfig::default(), loss)?;
        step.forward_backward([("x", &x)])
    };
    assert!(plan(5).unwrap().is_finite());
    refusal(plan(8), &["under 8", "under 5"]);
}

/// The losses in a planned step: joined with the head, or after it. Some targets are ignored.
#[rstest]
fn losses_are_as_eager(
    #[values(0, 1, 2, 3, 4, 5)] which: usize,
    #[values(false, true)] with_head: bool,
) {
    let parameters = [weight("head", &[9, 6], 1), weight("mixing", &[6, 6], 2)];
    let targets = Tensor::new(&[3u32, 7, 8, 7, 0, 5], DEVICE).unwrap();
    let inputs = [("x", numbers(&[6, 6], 3)), ("targets", targets)];
    let config = CrossEntropyConfig {
        reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][which % 3],
        ignore_index: (which > 0).then_some(7),
        label_smoothing: [0.1, 0.0][which / 3],
        z_loss: if which == 1 { 0.0 } else { 0.01 },
        class_weights: (which > 3).then(|| numbers(&[9], 4).abs().unwrap()),
    };
    let loss = |x: &[Tensor]| {
        let h = ops::linear(&x[0], &parameters[1].1)?;
        let loss = match with_head {
            true => ops::linear_cross_entropy_with(&h, &parameters[0].1, &x[1], &config)?,
            false => ops::cross_entropy_with(&ops::linear(&h, &parameters[0].1)?, &x[1], &config)?,
        };
        match config.reduction {
            Reduction::None => ops::mean(&ops::mul(&loss, &loss)?),
            _ => Ok(loss),
        }
    };
    assert_as_eager(&parameters, &inputs, &loss, 5e-6);
}

#[test]
fn other_losses_are_as_eager() {
    let parameters = [weight("w", &[5, 6], 1)];
    let inputs = [
        ("x", numbers(&[4, 6], 2)),
        ("target", numbers(&[4, 5], 3).abs().unwrap()),
    ];
    let loss = |x: &[Tensor]| {
        let y = ops::linear(&x[0], &parameters[0].1)?;
        let weights = BceWeights {
            weight: None,
            pos_weight: Some(&x[1]),
        };
        let losses = [
            ops::mse_loss(&y, &x[1], Reduction::Mean)?,
            ops::l1_loss(&y, &x[1], Reduction::Mean)?,
            ops::bce_with_logits(&y, &x[1], weights, Reduction::Mean)?,
            ops::kl_div(&y, &x[1], KlTarget::Probabilities, Reduction::Sum)?,
        ];
        ops::mean(&ops::stack(&losses.each_ref(), 0)?)
    };
    assert_as_eager(&parameters, &inputs, &loss, 2e-6);
}
