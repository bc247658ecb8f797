//! Planned steps of arbitrary losses have the results of eager ones.

use super::distance;
use crate::check::refusal;
use crate::settings::{meta_of, with_mask, with_weights};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, Mask};
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::internals::Category;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing, checkpoint};
use tallow::ops::{Gelu, KernelPolicy, RotaryPairs, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::{Autocast, Precision};
use tallow::{Result, autocast, graph, no_grad, ops};

const DEVICE: &Device = &Device::Cpu;

fn clipping() -> StepConfig {
    StepConfig {
        clip_norm: Some(1.0),
        ..Default::default()
    }
}

/// Runs `f` under autocast on the CPU if there is a dtype.
fn in_half<T>(half: Option<DType>, f: impl FnOnce() -> Result<T>) -> Result<T> {
    match half {
        None => f(),
        Some(dtype) => autocast(Autocast::cpu(dtype), f),
    }
}

/// The loss of these inputs, with autograd's graph.
pub type Loss<'a> = &'a (dyn Fn(&[Tensor]) -> Result<Tensor> + Sync);

/// Returns the meta tensors of these inputs, in their order.
pub fn meta(inputs: &Inputs, of: &[(&str, Tensor)]) -> Result<Vec<Tensor>> {
    of.iter().map(|(name, _)| inputs.get(name)).collect()
}

/// Checks the loss and the step's gradients against backward from `eager`, within `bound`.
fn assert_near(step: &Step, loss: f32, parameters: &[(String, Var)], eager: &Tensor, bound: f64) {
    let gradients = eager.backward().unwrap();
    let eager: f32 = eager.to_dtype(DType::F32).unwrap().to_scalar().unwrap();
    assert!(
        (loss - eager).abs() <= bound.max(1e-7) as f32 * eager.abs(),
        "{loss} {eager}"
    );
    let found = step.gradients().unwrap();
    assert_eq!(found.len(), parameters.len());
    for (name, gradient) in &found {
        let (_, var) = parameters.iter().find(|(other, _)| other == name).unwrap();
        let off = distance(gradient, gradients.get(var).unwrap());
        assert!(off <= bound, "{name}: {off:e}");
    }
}

/// Checks planned loss and gradients against eager ones, within `bound`, and also the weights after three steps. The
/// step must update the same tensors.
pub fn assert_as_eager(
    parameters: &[(String, Var)],
    inputs: &[(&str, Tensor)],
    loss: Loss,
    bound: f64,
) {
    let real: Vec<Tensor> = inputs.iter().map(|(_, x)| x.clone()).collect();
    let named: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, x)| (*name, x)).collect();
    let named = named.as_slice();
    let mut optimizer = Optimizer::new(parameters.to_vec(), AdamWConfig::default()).unwrap();
    let traced = |given: &Inputs| loss(&meta(given, inputs)?);
    let mut step = Step::new(&optimizer, &clipping(), traced).unwrap();

    let planned = step.forward_backward(named).unwrap();
    assert_near(&step, planned, parameters, &loss(&real).unwrap(), bound);

    // Three steps of each, from the same weights.
    let before: Vec<Tensor> = parameters
        .iter()
        .map(|(_, var)| var.copy().unwrap())
        .collect();
    for _ in 0..3 {
        step.run(&mut optimizer, named).unwrap();
    }
    let planned: Vec<Tensor> = parameters
        .iter()
        .map(|(_, var)| var.copy().unwrap())
        .collect();
    for ((_, var), before) in parameters.iter().zip(&before) {
        var.set(before).unwrap();
    }
    let mut optimizer = Optimizer::new(parameters.to_vec(), AdamWConfig::default()).unwrap();
    for _ in 0..3 {
        let mut gradients = loss(&real).unwrap().backward().unwrap();
        tallow::optim::clip_grad_norm(&mut gradients, parameters, 1.0).unwrap();
        optimizer.step(&gradients).unwrap();
    }
    for (((name, var), planned), before) in parameters.iter().zip(&planned).zip(&before) {
        let moved = distance(var, before);
        let off = distance(planned, var);
        assert!(
            off <= bound.max(1e-7) + moved * 1e-2,
            "{name}: {off:e}, moved {moved:e}"
        );
    }
}

fn random_ids(shape: (usize, usize), below: u32) -> Tensor {
    let count = shape.0 * shape.1;
    let ids = (0..count as u32).map(|i| (i * 7 + i * i * 3 + 1) % below);
    Tensor::from_iter(ids, DEVICE)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

#[rstest]
fn a_transformer(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(DType::BF16), Some(DType::F16))] half: Option<DType>,
    #[values(Checkpointing::None, Checkpointing::Sqrt)] checkpointing: Checkpointing,
) {
    let config = TransformerConfig {
        vocab_size: 20,
        context_length: 8,
        d_model: 16,
        num_layers: 3,
        num_heads: 2,
        d_ff: 32,
        ..Default::default()
    };
    let model = TransformerLM::new(&config, 0, DEVICE).unwrap();
    let model = model.with_attention(attention).unwrap();
    let model = model.with_checkpointing(checkpointing);
    let inputs = [
        ("tokens", random_ids((2, 7), 20)),
        ("targets", random_ids((2, 7), 19)),
    ];
    let loss = |x: &[Tensor]| in_half(half, || model.loss(&x[0], &x[1]));
    let bound = if half.is_none() { 2e-6 } else { 2e-2 };
    assert_as_eager(&model.parameters(), &inputs, &loss, bound);
}

pub fn weight(name: &str, shape: &[usize], seed: u32) -> (String, Var) {
    (
        name.into(),
        Var::from_tensor(&numbers(shape, seed)).unwrap(),
    )
}

pub fn numbers(shape: &[usize], seed: u32) -> Tensor {
    let count: usize = shape.iter().product();
    let numbers = (0..count as u32).map(|i| {
        let mixed = (i + seed).wrapping_mul(2_654_435_761) >> 8;
        (mixed % 1000) as f32 / 1000.0 - 0.5
    });
    let flat = Tensor::from_iter(numbers, DEVICE).unwrap();
    flat.reshape(shape).unwrap()
}

/// One weight is both the embedding and the head; a frozen weight is read but not in the optimizer.
#[test]
fn tied_and_frozen_weights() {
    let table = weight("table", &[11, 6], 1);
    let mixing = weight("mixing", &[6, 6], 2);
    let frozen = weight("frozen", &[6, 6], 4).1;
    let inputs = [
        ("tokens", random_ids((2, 5), 11)),
        ("targets", random_ids((2, 5), 11)),
    ];
    let loss = |x: &[Tensor]| {
        let h = ops::embedding(&x[0], &table.1)?;
        let h = ops::add(&h, &ops::relu(&ops::linear(&h, &mixing.1)?)?)?;
        let h = ops::linear(&h, &frozen)?;
        ops::linear_cross_entropy(&h, &table.1, &x[1])
    };
    let before = frozen.copy().unwrap();
    let parameters = [table.clone(), mixing.clone()];
    assert_as_eager(&parameters, &inputs, &loss, 2e-6);
    assert_eq!(distance(&frozen, &before), 0.0);
}

/// A loss with its weights and named inputs.
pub struct Case {
    pub parameters: Vec<(String, Var)>,
    pub inputs: Vec<(&'static str, Tensor)>,
    pub loss: fn(&[Var], &[Tensor]) -> Result<Tensor>,
    /// The largest distance between planned and eager gradients, in f32 unless the loss casts.
    pub bound: f64,
}

impl Case {
    fn assert_as_eager(&self, half: Option<DType>) {
        let bound = if half.is_none() { self.bound } else { 3e-2 };
        let weights: Vec<Var> = self.parameters.iter().map(|(_, var)| var.clone()).collect();
        let loss = |x: &[Tensor]| in_half(half, || (self.loss)(&weights, x));
        assert_as_eager(&self.parameters, &self.inputs, &loss, bound);
    }
}

/// Returns a loss with views, broadcasts, a constant, and every op of this crate's own models.
pub fn every_op() -> Case {
    Case {
        parameters: vec![
            weight("table", &[11, 8], 1),
            weight("positions", &[6, 8], 2),
            weight("norm", &[8], 3),
            weight("bias", &[8], 4),
            weight("w1", &[12, 8], 5),
            weight("w3", &[12, 8], 6),
            weight("w2", &[8, 12], 7),
            weight("mixing", &[8, 8], 8),
        ],
        inputs: vec![
            ("tokens", random_ids((2, 5), 11)),
            ("targets", random_ids((2, 5), 4)),
            ("noise", numbers(&[2, 5, 8], 9)),
        ],
        bound: 5e-6,
        loss: |weights, x| {
            let [table, positions, norm, bias, w1, w3, w2, mixing] = weights else {
                panic!("eight weights");
            };
            let scale = Tensor::new(&[0.5f32, 2.0], DEVICE)?;
            let h = ops::embedding(&x[0], table)?; // (2, 5, 8)
            let h = ops::add(&h, &positions.narrow(0, 1, 5)?)?;
            let h = ops::layer_norm(&h, norm, bias, 1e-5)?;
            let h = ops::sub(&h, &ops::mul(&x[2], &h)?)?;
            let swapped = ops::softmax(&h.transpose(1, 2)?, 0.7, Mask::Full)?; // (2, 8, 5)
            let product = ops::matmul(&swapped, &h)?; // (2, 8, 8)
            let product = ops::matmul_transposed(&h, &product)?; // (2, 5, 8)
            let size = ops::add(&ops::mul(&h, &h)?, &scale.narrow(0, 1, 1)?)?;
            let h = ops::div(&product, &size)?;
            let gated = ops::swiglu_linear(&h, w1, w3)?;
            let gated = ops::swiglu(&gated, &ops::linear(&h, w1)?)?;
            let h = ops::add(&h, &ops::linear(&gated, w2)?)?;
            let h = ops::rms_norm(&h, norm, 1e-5)?;
            let heads = ops::split_heads(&h, 2)?;
            let config = AttentionConfig::default();
            let heads = tallow::attention::naive(&heads, &heads, &heads, &config)?;
            let h = ops::merge_heads(&heads)?;
            let logits = ops::linear(&h, mixing)?.narrow(2, 0, 4)?;
            let loss = ops::cross_entropy_ignoring(&logits, &x[1], 3)?;
            let head = ops::linear_cross_entropy_ignoring(&h, mixing, &x[1], 3)?;
            let loss = ops::add(&loss, &head)?;
            ops::add(&loss, &ops::mean(&ops::mul(&h, &h)?)?)
        },
    }
}

/// Head and loss are computed in blocks of rows, with the same gradients; the logits of all rows never exist together.
#[rstest]
fn the_loss_in_rows(#[values(None, Some(DType::BF16))] half: Option<DType>) {
    let (rows, classes) = (150, 40_000);
    let (head, inner) = (
        weight("head", &[classes, 4], 1),
        weight("inner", &[4, 4], 2),
    );
    let ids = (0..rows as u32).map(|i| (i * 7919) % classes as u32);
    let targets = Tensor::from_iter(ids, DEVICE).unwrap();
    let inputs = [("x", numbers(&[rows, 4], 3)), ("targets", targets)];
    let loss = |x: &[Tensor]| {
        in_half(half, || {
            ops::linear_cross_entropy(&ops::linear(&x[0], &inner.1)?, &head.1, &x[1])
        })
    };
    let bound = if half.is_none() { 2e-6 } else { 2e-2 };
    let parameters = [head.clone(), inner.clone()];
    assert_as_eager(&parameters, &inputs, &loss, bound);

    let optimizer = Optimizer::new(parameters.to_vec(), AdamWConfig::default()).unwrap();
    let named = inputs.each_ref().map(|(name, x)| (*name, x));
    let once = |given: &Inputs| loss(&meta(given, &inputs)?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), once).unwrap();
    let logits_bytes =
        (rows * classes) as u64 * half.map_or(4, |dtype| dtype.size_in_bytes() as u64);
    assert!(step.prepare(named).unwrap().arena_bytes() < logits_bytes);
    // If the loss is processed further, its gradient is not 1, and all logits are kept.
    let doubled = |given: &Inputs| ops::add(&once(given)?, &once(given)?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), doubled).unwrap();
    assert!(step.prepare(named).unwrap().arena_bytes() > 2 * logits_bytes);
}

/// Returns head and loss with an ignored target id outside the vocabulary. The logits exceed one block, on a GPU too.
pub fn ignoring_head() -> Case {
    const ROWS: usize = 260;
    let ids = (0..ROWS as u32).map(|i| match i % 3 {
        0 => u32::MAX,
        _ => i * 7919 % 180_000,
    });
    Case {
        parameters: vec![
            weight("head", &[180_000, 4], 1),
            weight("inner", &[4, 4], 2),
        ],
        inputs: vec![
            ("x", numbers(&[ROWS, 4], 3)),
            ("targets", Tensor::from_iter(ids, DEVICE).unwrap()),
        ],
        bound: 2e-6,
        loss: |weights, x| {
            let inner = ops::linear(&x[0], &weights[1])?;
            ops::linear_cross_entropy_ignoring(&inner, &weights[0], &x[1], u32::MAX.into())
        },
    }
}

#[rstest]
fn a_head_that_ignores_targets_is_as_eager(
    #[values(None, Some(DType::BF16), Some(DType::F16))] half: Option<DType>,
) {
    let case = ignoring_head();
    case.assert_as_eager(half);
    let optimizer = Optimizer::new(case.parameters.clone(), AdamWConfig::default()).unwrap();
    let weights: Vec<Var> = case.parameters.iter().map(|(_, var)| var.clone()).collect();
    let loss = |given: &Inputs| (case.loss)(&weights, &meta(given, &case.inputs)?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), loss).unwrap();
    let named: Vec<_> = case.inputs.iter().map(|(name, x)| (*name, x)).collect();
    let plan = step.prepare(named.as_slice()).unwrap();
    assert!(plan.arena_bytes() < 260 * 180_000 * 4);
}

/// Each micro-batch has the mean over its own counted targets; ignored rows may hold anything.
#[test]
fn micro_batches_that_ignore_differently() {
    const IGNORED: u32 = 5;
    let weights = [weight("head", &[11, 4], 1), weight("inner", &[4, 4], 2)];
    let x = numbers(&[6, 4], 3);
    let mut rows: Vec<Vec<f32>> = x.to_vec2().unwrap();
    rows[1].fill(f32::INFINITY);
    let x = Tensor::new(rows, DEVICE).unwrap();
    let targets = Tensor::new(&[3u32, 5, 10, 5, 5, 0], DEVICE).unwrap();
    let loss = |x: &Tensor, targets: &Tensor| {
        let h = ops::add(x, &ops::linear(x, &weights[1].1)?)?;
        ops::linear_cross_entropy_ignoring(&h, &weights[0].1, targets, IGNORED.into())
    };
    let optimizer = Optimizer::new(weights.to_vec(), AdamWConfig::default()).unwrap();
    let config = StepConfig {
        accumulation: 2,
        ..Default::default()
    };
    let traced = |inputs: &Inputs| loss(&inputs.get("x")?, &inputs.get("targets")?);
    let mut step = Step::new(&optimizer, &config, traced).unwrap();
    let finite = x.clamp(-9f32, 9f32).unwrap();
    for x in [&x, &finite] {
        let planned = step
            .forward_backward([("x", x), ("targets", &targets)])
            .unwrap();
        let half = |i: usize| loss(&finite.narrow(0, 3 * i, 3)?, &targets.narrow(0, 3 * i, 3)?);
        let eager = ((half(0).unwrap() + half(1).unwrap()).unwrap() / 2.0).unwrap();
        let gradients = eager.backward().unwrap();
        let eager: f32 = eager.to_scalar().unwrap();
        assert!((planned - eager).abs() <= 1e-6 * eager, "{planned} {eager}");
        for (name, gradient) in step.gradients().unwrap() {
            let (_, var) = weights.iter().find(|(other, _)| *other == name).unwrap();
            // Ignored rows are multiplied by 0, which gives NaN for infinity.
            if x.to_vec2::<f32>().unwrap()[1][0].is_finite() {
                let off = distance(&gradient, gradients.get(var).unwrap());
                assert!(off <= 1e-6, "{name}: {off:e}");
            }
        }
    }
    let nothing = Tensor::full(IGNORED, 6, DEVICE).unwrap();
    refusal(
        step.forward_backward([("x", &finite), ("targets", &nothing)]),
        &["all ignored"],
    );
}

/// Targets in i64, of which -100 is ignored, planned in i64 or u32: the results equal an eager step's.
#[rstest]
fn targets_in_i64(
    #[values(DType::I64, DType::U32)] planned: DType,
    #[values(false, true)] fused: bool,
) {
    const IGNORED: i64 = -100;
    let weights = [weight("head", &[11, 4], 1), weight("table", &[5, 4], 2)];
    let wide = |ids: &[[i64; 3]; 2]| Tensor::new(ids, DEVICE).unwrap();
    let tokens = wide(&[[4, 0, 2], [2, 1, 3]]);
    let targets = wide(&[[3, IGNORED, 10], [IGNORED, IGNORED, 0]]);
    let fixed = wide(&[[1, 2, IGNORED], [4, IGNORED, 6]]);
    let loss = |tokens: &Tensor, targets: &Tensor| {
        let h = ops::gelu(&ops::embedding(tokens, &weights[1].1)?, Gelu::Tanh)?;
        if fused {
            return ops::linear_cross_entropy_ignoring(&h, &weights[0].1, targets, IGNORED);
        }
        let logits = ops::linear(&h, &weights[0].1)?;
        let of_targets = ops::cross_entropy_ignoring(&logits, &targets.t()?.t()?, IGNORED)?;
        ops::add(
            &of_targets,
            &ops::cross_entropy_ignoring(&logits, &fixed, IGNORED)?,
        )
    };
    let meta = ["tokens", "targets"].map(|name| graph::input(name, (2, 3), planned).unwrap());
    let optimizer = Optimizer::new(weights.to_vec(), AdamWConfig::default()).unwrap();
    let traced = |inputs: &Inputs| loss(&inputs.get("tokens")?, &inputs.get("targets")?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), traced).unwrap();
    step.prepare((&meta[0], &meta[1])).unwrap();
    let run = |step: &mut Step, targets: &Tensor| step.forward_backward((&tokens, targets));
    let found = run(&mut step, &targets).unwrap();
    let eager = loss(&tokens, &targets).unwrap();
    assert_near(&step, found, &weights, &eager, 1e-6);
    let outside = wide(&[[3, IGNORED, 10], [-1, IGNORED, 0]]);
    refusal(run(&mut step, &outside), &["id -1 at position 3"]);
    let narrow = Tensor::new(&[[3u32, 5, 10], [5, 5, 0]], DEVICE).unwrap();
    assert!(run(&mut step, &narrow).is_ok());
    assert_eq!(step.plans().count(), 1);
}

/// Ids in i64 become u32, so an ignored id would change its value if it is also read as a number.
#[test]
fn ids_in_i64_that_are_numbers_too() {
    let head = weight("head", &[11, 4], 1);
    let targets = graph::input("targets", 3, DType::I64).unwrap();
    let x = graph::input("x", (3, 4), DType::F32).unwrap();
    let optimizer = Optimizer::new([head.clone()], AdamWConfig::default()).unwrap();
    let mut step = Step::new(&optimizer, &StepConfig::default(), |inputs| {
        let (x, targets) = (inputs.get("x")?, inputs.get("targets")?);
        let loss = ops::linear_cross_entropy_ignoring(&x, &head.1, &targets, -100)?;
        ops::add(&loss, &ops::mean(&ops::cast(&targets, DType::F32)?)?)
    })
    .unwrap();
    let refused = step.prepare([("x", &x), ("targets", &targets)]);
    refusal(refused, &["pass the ids in u32"]);
}

/// No gradient flows through detached tensors, nor through those computed without a graph.
#[test]
fn detached() {
    let w = weight("w", &[4, 4], 1);
    let inputs = [("x", numbers(&[3, 4], 2))];
    let loss = |x: &[Tensor]| {
        let h = ops::linear(&x[0], &w.1)?;
        let gate = ops::sigmoid(&h.detach())?;
        let scale = no_grad(|| ops::relu(&ops::linear(&h, &w.1)?))?;
        ops::mean(&ops::mul(&ops::mul(&h, &gate)?, &ops::add(&scale, &h)?)?)
    };
    assert_as_eager(std::slice::from_ref(&w), &inputs, &loss, 2e-6);
}

/// Returns a loss of ops that other models have.
pub fn ops_of_other_models() -> Case {
    Case {
        parameters: vec![
            weight("first", &[12, 8], 1),
            weight("second", &[8, 20], 2),
            weight("bias", &[12], 3),
            weight("gate", &[8], 4),
        ],
        inputs: vec![("x", numbers(&[2, 4, 8], 5)), ("y", numbers(&[2, 4, 8], 6))],
        bound: 5e-6,
        loss: |weights, x| {
            let [first, second, bias, gate] = weights else {
                panic!("four weights");
            };
            let h = ops::linear_bias(&x[0], first, bias)?; // (2, 4, 12)
            let smooth = ops::gelu(&h, Gelu::Tanh)?;
            let exact = ops::gelu(&ops::silu(&h)?.narrow(2, 2, 8)?, Gelu::Erf)?; // (2, 4, 8)
            let h = ops::concat(&[&smooth, &exact], 2)?; // (2, 4, 20)
            let h = ops::linear(&h, second)?; // (2, 4, 8)
            let gate = ops::sigmoid(gate)?;
            let h = ops::add_scaled(&ops::mul(&h, &gate)?, &ops::tanh(&h)?, 0.3)?;
            let angles = Tensor::from_iter((0..8).map(|i| i as f32 / 5.0), x[0].device())?; // a constant
            let angles = angles.reshape((4, 2))?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let heads = ops::split_heads(&h, 2)?; // (2, 2, 4, 4)
            let heads = ops::rope_with(&heads, &cos, &sin, RotaryPairs::Halves)?;
            let heads = ops::repeat_heads(&heads, 2)?; // (2, 4, 4, 4)
            let wide = ops::merge_heads(&heads)?; // (2, 4, 16)
            let swapped = ops::contiguous(&wide.transpose(1, 2)?)?.reshape((2, 8, 8))?;
            let off = ops::sub(&swapped.narrow(1, 0, 4)?, &x[1])?;
            let small = ops::cast(&ops::exp(&ops::log(&ops::sigmoid(&off)?)?)?, DType::F32)?;
            ops::mean(&ops::mul(&small, &small)?)
        },
    }
}

/// Returns a loss of elementwise ops and reductions: all kinds of broadcasting, powers, probabilities and their
/// logarithms, concatenation along each dimension.
pub fn elementwise_ops() -> Case {
    Case {
        parameters: vec![
            weight("square", &[8, 8], 7),
            weight("first", &[3, 4, 8], 1),
            weight("columns", &[8], 2),
            weight("rows", &[4, 1], 3),
            weight("scalar", &[1], 4),
            weight("outer", &[3, 1, 8], 5),
        ],
        inputs: vec![("x", numbers(&[3, 4, 8], 6))],
        bound: 5e-6,
        loss: |weights, x| {
            let [square, first, columns, rows, scalar, outer] = weights else {
                panic!("six weights");
            };
            let h = ops::linear(&x[0], square)?; // (3, 4, 8), in the region's dtype
            let like = |weight: &Var| ops::cast(weight, h.dtype());
            let columns = like(columns)?;
            let h = ops::mul(&h, &ops::add(&like(first)?, &columns)?)?;
            let h = ops::sub(&h, &like(rows)?)?;
            let h = ops::add_scaled(&h, &like(outer)?, -0.7)?;
            let above = ops::add(&ops::mul(&h, &h)?, &ops::exp(&like(scalar)?)?)?;
            let h = ops::div(&ops::relu(&h)?, &above)?;
            let h = ops::add(&h, &ops::rsqrt(&above)?)?;
            let h = ops::sub(&h, &ops::pow(&above, -0.3)?)?;
            let p = ops::softmax(&h, 3.0, Mask::Causal)?;
            let log_p = ops::log_softmax(&ops::div(&columns, &above)?)?;
            let h = ops::concat(&[&ops::mul(&p, &log_p)?, &h.narrow(2, 1, 3)?], 2)?; // (3, 4, 11)
            let h = ops::concat(&[&h, &h.narrow(1, 0, 2)?], 1)?; // (3, 6, 11)
            let h = ops::concat(&[&h.narrow(0, 1, 1)?, &h], 0)?; // (4, 6, 11)
            let h = ops::sub(&h, &ops::mean_keepdim(&h, 1)?)?;
            let h = ops::sub(&h, &ops::max_keepdim(&h, (0, 2))?)?;
            let h = ops::div(&h, &ops::affine(&ops::var_keepdim(&h, 1, 1)?, 1.0, 1.0)?)?;
            let h = ops::add(&h, &ops::logsumexp(&h, 2)?.unsqueeze(2)?)?;
            let h = ops::sub(&h, &ops::min_over(&h, 0)?)?;
            let h = ops::affine(&ops::clamp(&h, -2.0, 0.9)?, 1.5, 0.25)?;
            let h = ops::sqrt(&ops::affine(&ops::abs(&h)?, 1.0, 0.5)?)?;
            let h = ops::add(&h, &ops::sum_over(&h, (0, 2))?.unsqueeze(1)?)?;
            let turned = ops::log(&ops::add(&ops::mul(&h, &h)?, &ops::exp(&h)?)?)?;
            let turned = ops::contiguous(&turned.transpose(0, 2)?)?; // (11, 6, 4)
            let sums = ops::sum(&ops::mul(
                &turned.narrow(0, 2, 4)?,
                &turned.narrow(0, 7, 4)?,
            )?)?;
            let sums = ops::cast(&sums, DType::F32)?;
            ops::add(&sums, &ops::cast(&ops::mean(&log_p)?, DType::F32)?)
        },
    }
}

/// A gradient that is not finite ends the step before anything changes, and the error names the parameter. With
/// clipping, gradients have separate buffers.
#[test]
fn gradients_that_are_not_finite() {
    let (good, bad) = (weight("good", &[4, 4], 1), weight("bad", &[4, 4], 2));
    let parameters = vec![good.clone(), bad.clone()];
    let mut optimizer = Optimizer::new(parameters, AdamWConfig::default()).unwrap();
    let loss = |inputs: &Inputs| {
        let x = inputs.get("x")?;
        let h = ops::linear(&x, &good.1)?;
        ops::mean(&ops::add(&h, &ops::mul(&x, &ops::linear(&x, &bad.1)?)?)?)
    };
    let mut step = Step::new(&optimizer, &clipping(), loss).unwrap();
    let x = Tensor::full(1e30f32, (3, 4), DEVICE).unwrap();
    let buffers = step.prepare([("x", &x)]).unwrap().buffers().iter();
    let gradients = buffers.filter(|buffer| buffer.category == Category::Gradient);
    assert_eq!(
        gradients.map(|buffer| buffer.bytes()).sum::<u64>(),
        2 * 4 * 4 * 4
    );
    let before = [&good.1, &bad.1].map(|var| var.copy().unwrap());
    refusal(step.run(&mut optimizer, [("x", &x)]), &["parameter bad"]);
    for (before, var) in before.iter().zip([&good.1, &bad.1]) {
        assert_eq!(distance(var, before), 0.0);
    }
    let x = Tensor::full(1f32, (3, 4), DEVICE).unwrap();
    step.run(&mut optimizer, [("x", &x)]).unwrap();
    assert!(step.gradient_norm().unwrap() > 0.0);
    step.forward_backward([("x", &x)]).unwrap();
    assert_eq!(step.gradient_norm(), None); // nothing was clipped
}

/// Returns a loss of slices: tokens and targets from one input, a weight and a table read in slices; also a head in
/// half precision and a mask in u8.
pub fn parts() -> Case {
    let walk = Tensor::from_iter((0..210u32).map(|i| i * 37 % 90), DEVICE).unwrap();
    let mask = Tensor::from_iter((0..1400).map(|i| (i % 3) as u8), DEVICE).unwrap();
    Case {
        parameters: vec![
            weight("table", &[90, 8], 1),
            weight("fused", &[16, 8], 2),
            weight("positions", &[9, 8], 3),
        ],
        inputs: vec![
            ("walk", walk.reshape((35, 6)).unwrap()),
            ("mask", mask.reshape((35, 5, 8)).unwrap()),
        ],
        bound: 1e-2,
        loss: |weights, x| {
            let [table, fused, positions] = weights else {
                panic!("three weights");
            };
            let h = ops::embedding(&x[0].narrow(1, 0, 5)?, table)?; // (35, 5, 8)
            let both = ops::add(&positions.narrow(0, 4, 5)?, &positions.narrow(0, 0, 5)?)?;
            let h = ops::add(&h, &both)?;
            let (first, second) = (fused.narrow(0, 8, 8)?, fused.narrow(0, 0, 8)?);
            let h = ops::add(&ops::linear(&h, &first)?, &ops::linear(&h, &second)?)?;
            let h = ops::cast(&ops::mul(&h, &x[1])?, DType::BF16)?;
            let head = ops::cast(table, DType::BF16)?;
            let targets = ops::contiguous(&x[0].narrow(1, 1, 5)?)?;
            ops::linear_cross_entropy(&h, &head, &targets)
        },
    }
}

/// Returns a loss in which ops other than linear read the output of a norm or a gate. Backward recomputes these outputs
/// after such an op has read them.
pub fn recomputed_outputs() -> Case {
    Case {
        parameters: vec![
            weight("first", &[8, 6], 1),
            weight("scale", &[8], 2),
            weight("mixing", &[8, 8], 3),
            weight("times", &[5, 8], 4),
            weight("w1", &[12, 8], 5),
            weight("w3", &[12, 8], 6),
            weight("over", &[5, 12], 7),
            weight("bias", &[8], 8),
        ],
        inputs: vec![("x", numbers(&[5, 6], 9))],
        bound: 5e-6,
        loss: |weights, x| {
            let [first, scale, mixing, times, w1, w3, over, bias] = weights else {
                panic!("eight weights");
            };
            let h = ops::linear(&x[0], first)?; // (5, 8)
            let y = ops::rms_norm(&h, scale, 1e-5)?;
            let a = ops::matmul(&y, mixing)?;
            let b = ops::mul(&y, times)?;
            let sum = ops::add(&h, &ops::add(&a, &b)?)?;
            let normed = ops::layer_norm(&sum, scale, bias, 1e-5)?;
            let gated = ops::swiglu_linear(&normed, w1, w3)?; // (5, 12)
            let c = ops::mul(&gated, &ops::sigmoid(over)?)?;
            let d = ops::mul(&gated, over)?;
            let both = ops::concat(&[&ops::add(&c, &d)?, &sum], 1)?;
            ops::mean(&ops::mul(&both, &both)?)
        },
    }
}

/// Returns a loss with checkpointed segments that hold attention without its projections, a gate alone, and the loss.
pub fn fused_in_segments() -> Case {
    Case {
        parameters: vec![
            weight("table", &[11, 16], 1),
            weight("q", &[16, 16], 2),
            weight("k", &[16, 16], 3),
            weight("v", &[16, 16], 4),
            weight("w1", &[12, 16], 5),
            weight("w3", &[12, 16], 6),
            weight("w2", &[16, 12], 7),
        ],
        inputs: vec![
            ("tokens", random_ids((2, 5), 11)),
            ("targets", random_ids((2, 5), 11)),
        ],
        bound: 5e-6,
        loss: |weights, x| {
            let [table, q, k, v, w1, w3, w2] = weights else {
                panic!("seven weights");
            };
            let h = ops::embedding(&x[0], table)?; // (2, 5, 16)
            let projected = [q, k, v].map(|weight| ops::linear(&h, weight));
            let [q, k, v] = projected;
            let angles = Tensor::from_iter((0..20).map(|i| i as f32 / 5.0), h.device())?;
            let angles = angles.reshape((5, 4))?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let attend = move |x: [&Tensor; 3]| {
                let [q, k, v] = x.map(|x| ops::split_heads(x, 2));
                let [q, k] = [q, k].map(|x| ops::rope(&x?, &cos, &sin));
                let config = with_mask(Mask::Causal);
                ops::merge_heads(&attention::flash(&q?, &k?, &v?, &config)?)
            };
            let h = ops::add(&h, &checkpoint(attend, [&q?, &k?, &v?])?)?;
            let gate = |[x, w1, w3]: [&Tensor; 3]| ops::swiglu_linear(x, w1, w3);
            let h = ops::linear(&checkpoint(gate, [&h, w1, w3])?, w2)?;
            let targets = x[1].clone();
            let loss = move |[x, head]: [&Tensor; 2]| ops::linear_cross_entropy(x, head, &targets);
            checkpoint(loss, [&h, table])
        },
    }
}

/// All cases equal eager; those whose loss has no cast also in half precision.
#[rstest]
#[case::every_op(every_op, &[None])]
#[case::ops_of_other_models(ops_of_other_models, &[None, Some(DType::BF16)])]
#[case::elementwise_ops(elementwise_ops, &[None, Some(DType::BF16)])]
#[case::parts(parts, &[None])]
#[case::recomputed_outputs(recomputed_outputs, &[None, Some(DType::BF16)])]
#[case::fused_in_segments(fused_in_segments, &[None, Some(DType::BF16)])]
fn cases_are_as_eager(#[case] case: fn() -> Case, #[case] dtypes: &[Option<DType>]) {
    for half in dtypes {
        case().assert_as_eager(*half);
    }
}

/// One of a gate's two weights is a cast intermediate, the other is read as its half-precision copy.
#[test]
fn one_weight_is_no_variable() {
    let (w1, w3) = (weight("w1", &[6, 4], 1), weight("w3", &[6, 4], 2));
    let inputs = [("x", numbers(&[5, 4], 3))];
    let loss = |x: &[Tensor]| {
        autocast(Autocast::cpu(DType::BF16), || {
            let scaled = ops::mul(&w1.1, &w3.1)?;
            let y = ops::swiglu_linear(&x[0], &scaled, &w3.1)?;
            ops::cast(&ops::mean(&y)?, DType::F32)
        })
    };
    assert_as_eager(&[w1.clone(), w3.clone()], &inputs, &loss, 3e-2);
}

/// In f64, to its own rounding: the language model, and also LayerNorm, a linear layer with bias, and GELU.
#[rstest]
fn in_f64(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let weights = nn::seeded(0, DType::F64, DEVICE);
    let meta = meta_of(&super::config(2, 2, 8, 24), attention);
    let model = with_weights(&meta, weights.clone());
    let ids = |name| (name, random_ids((2, 10), 97));
    let inputs = [ids("tokens"), ids("targets")];
    let loss = |x: &[Tensor]| model.loss(&x[0], &x[1]);
    assert_as_eager(&model.parameters(), &inputs, &loss, 1e-13);

    let norm = nn::LayerNorm::new(6, 1e-5, weights.pp("norm")).unwrap();
    let map = nn::Linear::with_bias(6, 5, weights.pp("map")).unwrap();
    let named = |layer: &dyn nn::Layer, path: &str| {
        let parameters = layer.parameters().into_iter();
        let named = parameters.map(|(name, var)| (format!("{path}.{name}"), var));
        named.collect::<Vec<_>>()
    };
    let parameters = [named(&norm, "norm"), named(&map, "map")].concat();
    let x = (0..42).map(|i| f64::from(i * i % 17) - 8.0);
    let x = Tensor::from_iter(x, DEVICE).unwrap();
    let inputs = [("x", x.reshape((7, 6)).unwrap())];
    let loss = |x: &[Tensor]| {
        let hidden = ops::gelu(&map.forward(&norm.forward(&x[0])?)?, ops::Gelu::Erf)?;
        ops::mean(&ops::mul(&hidden, &hidden)?)
    };
    assert_as_eager(&parameters, &inputs, &loss, 1e-13);
}

#[test]
fn a_model_in_f64() {
    let config = super::config(1, 2, 8, 24);
    let model = TransformerLM::from_var_builder(&config, nn::seeded(0, DType::F64, DEVICE));
    let model = model.unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let tokens = random_ids((2, 10), 97);
    let mut forward = super::logits_of(&model, Precision::F32);
    let logits = forward.forward([("tokens", &tokens)]).unwrap();
    assert_eq!(logits.dtype(), DType::F64);
    assert!(distance(&logits, &model.forward(&tokens).unwrap()) < 1e-14);
    let eager = model.loss(&tokens, &tokens).unwrap();
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let loss = step.run(&mut optimizer, (&tokens, &tokens)).unwrap();
    assert_eq!(
        f64::from(loss) as f32,
        eager.to_scalar::<f64>().unwrap() as f32
    );
    let mixed = [(
        "half".to_string(),
        Var::zeros(3, DType::F32, DEVICE).unwrap(),
    )];
    let mixed = Optimizer::new(
        mixed.into_iter().chain(model.parameters()),
        AdamWConfig::default(),
    );
    let refused = Step::new(&mixed.unwrap(), &StepConfig::default(), |_| unreachable!());
    refusal(refused, &["parameters in f32"]);
}

#[test]
fn refusals() {
    let w = weight("w", &[4, 4], 1);
    let optimizer = Optimizer::new(vec![w.clone()], AdamWConfig::default()).unwrap();
    let good = Tensor::ones((3, 4), DType::F32, DEVICE).unwrap();
    let config = StepConfig::default();
    let refused = |loss: &(dyn Fn(&Tensor) -> Result<Tensor> + Sync), words: &str| {
        let step = Step::new(&optimizer, &config, |inputs| loss(&inputs.get("x")?));
        refusal(step.unwrap().prepare([("x", &good)]), &[words]);
    };
    let linear = |x: &Tensor| ops::linear(x, &w.1);
    let mean = |x: &Tensor| ops::mean(&linear(x)?);
    let reference = |x: &Tensor| with_kernel_policy(KernelPolicy::Reference, || mean(x));
    refused(&linear, "scalar f32");
    refused(&|x| ops::mean(&ops::mul(x, x)?), "without a graph");
    refused(&|x| Ok(linear(x)?.mean_all()?), "ops");
    refused(&|x| Ok(mean(x)?.detach()), "without a graph");
    refused(&reference, "composed of candle's own ops");
    let both = vec![w.clone(), weight("unused", &[3], 3)];
    let other = Optimizer::new(both, AdamWConfig::default()).unwrap();
    let mut step = Step::new(&other, &config, |inputs| mean(&inputs.get("x")?)).unwrap();
    refusal(step.prepare([("x", &good)]), &["unused"]);
    let mut optimizer = Optimizer::new(vec![w.clone()], AdamWConfig::default()).unwrap();
    let mut step = Step::new(&optimizer, &config, |inputs| mean(&inputs.get("x")?)).unwrap();
    let wide = Tensor::ones((3, 5), DType::F32, DEVICE).unwrap();
    let meta = graph::input("x", (3, 4), DType::F32).unwrap();
    for (inputs, words) in [
        (vec![], "no tensor for the input \"x\""),
        (vec![("y", &good)], "no tensor for the input \"x\""),
        (vec![("x", &good), ("y", &good)], "\"y\" is not an input"),
        (vec![("x", &good), ("x", &good)], "two inputs called \"x\""),
        (vec![("x", &wide)], "linear"),
        (vec![("x", &meta)], "meta"),
    ] {
        refusal(step.run(&mut optimizer, inputs.as_slice()), &[words]);
    }
    let row = w.1.narrow(0, 0, 3).unwrap();
    assert!(step.run(&mut optimizer, [("x", &row)]).is_ok());
    let both = [("x", &good), ("y", &good)];
    refusal(step.run(&mut optimizer, both), &["\"y\" is not an input"]);
    let more = w.1.narrow(0, 0, 2).unwrap();
    assert!(step.run(&mut optimizer, [("x", &more)]).is_ok());
    assert_eq!(step.plans().count(), 2);
}

/// Detaching one reader of a tensor leaves the gradients through its other readers: for a norm, linear layers that
/// share an input, and a weight.
#[rstest]
fn detached_for_some(#[values(None, Some(DType::BF16))] half: Option<DType>) {
    let names = ["first", "second", "third"];
    let [first, second, third] = [0, 1, 2].map(|i| weight(names[i], &[8, 8], i as u32 + 1));
    let scale = weight("scale", &[8], 4);
    let head = weight("head", &[5, 8], 5);
    let classes = Tensor::from_iter((0..6u32).map(|i| i % 5), DEVICE).unwrap();
    let inputs = [("x", numbers(&[6, 8], 6)), ("classes", classes)];
    let forward = |x: &[Tensor]| {
        let h = ops::linear(&x[0], &first.1)?;
        let a = ops::linear(&h, &second.1)?;
        let b = ops::linear(&h.detach(), &third.1)?;
        let h = ops::add(
            &ops::cast(&h, DType::F32)?,
            &ops::cast(&ops::add(&a, &b)?, DType::F32)?,
        )?;
        let y = ops::rms_norm(&h, &scale.1, 1e-5)?;
        let z = ops::rms_norm(&h.detach(), &scale.1.detach(), 1e-5)?;
        let of_scale = ops::rms_norm(&y, &scale.1.detach(), 1e-5)?;
        let h = ops::add(&h, &ops::add(&ops::add(&y, &z)?, &of_scale)?)?;
        ops::linear_cross_entropy(&h, &head.1, &x[1])
    };
    let loss = |x: &[Tensor]| in_half(half, || forward(x));
    let parameters = [
        first.clone(),
        second.clone(),
        third.clone(),
        scale.clone(),
        head.clone(),
    ];
    let bound = if half.is_none() { 5e-6 } else { 3e-2 };
    assert_as_eager(&parameters, &inputs, &loss, bound);
}
