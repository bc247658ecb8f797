//! Steps planned on a GPU against candle's backward there, against the losses of steps planned on the CPU, and against
//! their own repetition.

use super::architectures::of_gemma;
use super::{CPU, batch, bits, config, distance, logits_of};
use crate::check::refusal;
use crate::settings::{in_precision, meta_of, with_lr};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::internals::Call;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::Checkpointing;
use tallow::ops::RotaryPairs;
use tallow::optim::{GradScaler, GradScalerConfig, GradientAccumulator, Optimizer, grad_norm};
use tallow::precision::Precision;

/// The batch size and the length of a micro-batch.
const SIZES: [usize; 2] = [2, 37];

/// Returns the model of the CPU's seed on `device`, with its optimizer.
pub fn model_on(meta: &TransformerLM, device: &Device) -> (TransformerLM, Optimizer) {
    let model = TransformerLM::new(meta.config(), 5, &CPU).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    model.save(&path).unwrap();
    let model = TransformerLM::load(meta.config(), &path, device).unwrap();
    let model = model.with_attention(meta.attention()).unwrap();
    let model = model.with_checkpointing(meta.checkpointing());
    let optimizer = Optimizer::new(model.parameters(), with_lr(3e-3)).unwrap();
    (model, optimizer)
}

/// The losses of some steps, the last step's gradients, and the weights after it.
struct Trained {
    losses: Vec<f32>,
    gradients: Vec<(String, Tensor)>,
    weights: Vec<Tensor>,
    norm: Option<f64>,
}

/// Trains for some steps, on tokens (B, T) in each micro-batch.
fn train(
    meta: &TransformerLM,
    plan: &StepConfig,
    [batch_size, length]: [usize; 2],
    device: &Device,
    steps: usize,
) -> Trained {
    let (model, mut optimizer) = model_on(meta, device);
    let vocab_size = meta.config().vocab_size;
    let mut step = Step::for_model(&model, &optimizer, plan).unwrap();
    let mut losses = Vec::new();
    for i in 0..steps {
        optimizer.set_learning_rate(3e-3 / (i + 1) as f64); // read at each run
        let sequences = batch_size * plan.accumulation;
        let (tokens, targets) = batch(vocab_size, sequences, length, i);
        let [tokens, targets] = [tokens, targets].map(|ids| ids.to_device(device).unwrap());
        let loss = step.run(&mut optimizer, (&tokens, &targets));
        losses.push(loss.unwrap());
    }
    let on_cpu = |x: &Tensor| x.to_device(&CPU).unwrap();
    Trained {
        losses,
        gradients: match plan.optimizer_in_backward {
            true => Vec::new(),
            false => step.gradients().unwrap(),
        },
        weights: model.parameters().iter().map(|(_, w)| on_cpu(w)).collect(),
        norm: step.gradient_norm(),
    }
}

/// Returns the loss and gradients of the first step, of `parts` micro-batches of tokens (B, T), by candle's own
/// backward over the model's ops. It shares only the kernels with plans.
fn by_candle(
    meta: &TransformerLM,
    parts: usize,
    [rows, length]: [usize; 2],
    precision: Precision,
    device: &Device,
) -> Trained {
    let (model, _) = model_on(meta, device);
    let model = model.with_checkpointing(Checkpointing::None);
    let parameters = model.parameters();
    let (tokens, targets) = batch(meta.config().vocab_size, rows * parts, length, 0);
    let mut accumulator = GradientAccumulator::new(parameters.clone());
    let mut sum = 0.0;
    for part in 0..parts {
        let [tokens, targets] = [&tokens, &targets].map(|ids| {
            let ids = ids.narrow(0, part * rows, rows).unwrap();
            ids.contiguous().unwrap().to_device(device).unwrap()
        });
        let loss = precision.run(|| model.loss(&tokens, &targets)).unwrap();
        let loss = loss.to_dtype(DType::F32).unwrap();
        sum += loss.to_scalar::<f32>().unwrap();
        accumulator.add(loss.backward().unwrap()).unwrap();
    }
    let mean = accumulator.mean().unwrap();
    let named = parameters.iter();
    let gradients = named.map(|(name, var)| (name.clone(), mean.get(var).unwrap().clone()));
    Trained {
        losses: vec![sum / parts as f32],
        gradients: gradients.collect(),
        weights: Vec::new(),
        norm: Some(grad_norm(&mean, &parameters).unwrap()),
    }
}

/// Returns the largest distance of a gradient of b from that of a, relative to its norm.
fn furthest(a: &Trained, b: &Trained) -> f64 {
    let pairs = a.gradients.iter().zip(&b.gradients);
    let on_cpu = |x: &Tensor| x.to_device(&CPU).unwrap();
    let distances = pairs.map(|((_, a), (_, b))| distance(&on_cpu(b), &on_cpu(a)));
    distances.fold(0.0, f64::max)
}

/// Checks a step against candle's backward on the GPU. In half precision its error against f32 may be three times that
/// of candle's backward in the same precision; in f32 only the order of sums may differ.
pub(super) fn agree(meta: &TransformerLM, plan: &StepConfig, sizes: [usize; 2]) {
    let gpu = crate::gpu();
    let computed = (meta.attention(), meta.checkpointing());
    let what = format!("{:?} {computed:?} {plan:?} {sizes:?}", meta.config());
    let got = train(meta, plan, sizes, &gpu, 1);
    let by_candle = |precision| by_candle(meta, plan.accumulation, sizes, precision, &gpu);
    let exact = by_candle(Precision::F32);
    let judge = by_candle(plan.precision);
    let allowed = match plan.precision {
        Precision::F32 => 2e-5,
        _ => 3.0 * furthest(&exact, &judge),
    };
    let loss_error = f64::from((got.losses[0] - exact.losses[0]).abs() / exact.losses[0]);
    let allowed_loss = match plan.precision {
        Precision::F32 => 2e-6,
        _ => 1e-3,
    };
    assert!(loss_error <= allowed_loss, "{what}: {loss_error}");
    let error = furthest(&exact, &got);
    assert!(error <= allowed, "{what}: {error}, allowed {allowed}");
    if let (Some(got), Some(wanted)) = (got.norm, judge.norm) {
        assert!(
            (got - wanted).abs() <= 0.02 * wanted,
            "{what}: {got} {wanted}"
        );
    }
    // The losses of some steps have looser bounds: AdamW's first step is the sign of the gradient, which rounding may
    // flip where the gradient is small.
    let several = |device: &Device| train(meta, plan, sizes, device, 5);
    let (on_gpu, on_cpu) = (several(&gpu), several(&CPU));
    for (i, (got, wanted)) in on_gpu.losses.iter().zip(&on_cpu.losses).enumerate() {
        let error = f64::from((got - wanted).abs() / wanted);
        let allowed = if plan.precision == Precision::F32 {
            1e-4
        } else {
            1e-2
        };
        assert!(error <= allowed, "{what}, step {i}: {got} for {wanted}");
    }
    // Repetitions have the same bits, launched call by call or replayed from a graph.
    let again = several(&gpu);
    assert_eq!(on_gpu.losses, again.losses, "{what}");
    for (a, b) in on_gpu.weights.iter().zip(&again.weights) {
        let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(flat(a), flat(b), "{what}");
    }
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn precisions_and_attention(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values((2, 2, 24), (1, 3, 64), (3, 1, 128), (1, 2, 40))] shape: (usize, usize, usize),
) {
    let (layers, heads, head_dim) = shape;
    let model = meta_of(&config(layers, heads, head_dim, 56), attention);
    agree(&model, &in_precision(precision), SIZES);
    agree(&model, &in_precision(precision), [3, 130]);
}

/// Grouped heads with both rotary layouts; projections with biases, or norms of q and k.
#[rstest]
#[ignore = "needs a CUDA device"]
fn grouped_heads(
    #[values((4, 2, 24), (6, 1, 64), (3, 3, 128))] heads: (usize, usize, usize),
    #[values(RotaryPairs::Adjacent, RotaryPairs::Halves)] rope_pairs: RotaryPairs,
    #[values((false, false), (true, false), (false, true))] bias_and_norm: (bool, bool),
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let (heads, kv_heads, head_dim) = heads;
    let (qkv_bias, qk_norm) = bias_and_norm;
    let model = meta_of(
        &TransformerConfig {
            num_kv_heads: Some(kv_heads),
            rope_pairs,
            qkv_bias,
            qk_norm,
            ..config(2, heads, head_dim, 56)
        },
        attention,
    );
    agree(&model, &in_precision(precision), [3, 130]);
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn gemma2(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(64, 256)] head_dim: usize,
) {
    let model = meta_of(&of_gemma(config(2, 2, head_dim, 56)), attention);
    agree(&model, &in_precision(precision), [3, 130]);
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn options(
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
    #[values(None, Some(0.5), Some(f64::INFINITY))] clip_norm: Option<f64>,
    #[values(1, 3)] accumulation: usize,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
) {
    let plan = StepConfig {
        clip_norm,
        accumulation,
        ..in_precision(precision)
    };
    let model = meta_of(&config(2, 2, 32, 72), Algorithm::Flash).with_checkpointing(checkpointing);
    agree(&model, &plan, SIZES);
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn moments_in_bf16_are_as_eager(#[values(false, true)] optimizer_in_backward: bool) {
    let gpu = crate::gpu();
    let model = |meta: &TransformerLM| model_on(meta, &gpu).0;
    super::options::moments_in_bf16(model, &gpu, optimizer_in_backward);
}

#[test]
#[ignore = "needs a CUDA device"]
fn clipping_by_value_is_as_eager() {
    let gpu = crate::gpu();
    let model = |meta: &TransformerLM| model_on(meta, &gpu).0;
    for rule in super::options::rules() {
        super::options::clipping_by_value_to_the_bit(model, &gpu, rule);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn optimizers_take_turns_on_one_step() {
    super::options::optimizers_take_turns(&crate::gpu());
}

/// Vocabularies of several chunks, in multiples of 16 bytes or with a remainder, and one of less than 16 bytes.
#[rstest]
#[ignore = "needs a CUDA device"]
fn vocabularies(#[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision) {
    // In half precision the errors of only three embeddings do not average out.
    let tiny = (precision == Precision::F32).then_some(3);
    for vocab_size in [50_257, 10_000, 61].into_iter().chain(tiny) {
        let model = meta_of(
            &TransformerConfig {
                vocab_size,
                ..config(1, 2, 32, 72)
            },
            Algorithm::Flash,
        );
        agree(&model, &in_precision(precision), [16, 160]);
    }
}

/// In f32 the weights have the bits of a step that keeps its gradients. In bf16, where temporary gradients are rounded
/// to bf16, the weights' moves are at most 1.1 times as far from f32's. Two runs have the same bits.
#[rstest]
#[ignore = "needs a CUDA device"]
fn the_optimizer_in_backward(#[values(Precision::F32, Precision::BF16)] precision: Precision) {
    let gpu = crate::gpu();
    let model = meta_of(&config(2, 2, 32, 72), Algorithm::Naive);
    let exact = train(&model, &in_precision(Precision::F32), SIZES, &gpu, 4);
    let kept = train(&model, &in_precision(precision), SIZES, &gpu, 4);
    let plan = StepConfig {
        optimizer_in_backward: true,
        ..in_precision(precision)
    };
    let [freed, again] = [0, 1].map(|_| train(&model, &plan, SIZES, &gpu, 4));
    assert_eq!(freed.losses, again.losses);
    for (a, b) in freed.weights.iter().zip(&again.weights) {
        assert_eq!(distance(a, b), 0.0);
    }
    if precision == Precision::F32 {
        assert_eq!(kept.losses, freed.losses);
        for (a, b) in kept.weights.iter().zip(&freed.weights) {
            assert_eq!(distance(a, b), 0.0);
        }
        return;
    }
    let (start, _) = model_on(&model, &CPU);
    let from_exact = |trained: &Trained| -> f64 {
        let weights = trained.weights.iter().zip(&exact.weights);
        let moves = weights
            .zip(start.parameters())
            .map(|((got, wanted), (_, start))| {
                let [got, wanted] = [got, wanted].map(|x| (x - start.as_tensor()).unwrap());
                distance(&got, &wanted)
            });
        moves.sum()
    };
    let (kept, freed) = (from_exact(&kept), from_exact(&freed));
    assert!(freed <= 1.1 * kept, "{freed}, with gradients in f32 {kept}");
}

/// Recomputation under a memory budget does not change a bit. Half precision recomputes residual sums first, then
/// gates.
#[rstest]
#[ignore = "needs a CUDA device"]
fn sums_and_gates_run_again(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
    #[values(99, 90)] percent: u64,
) {
    let gpu = crate::gpu();
    let model = meta_of(&config(3, 2, 32, 136), Algorithm::Flash);
    let sizes = [8, 130];
    let meta = Batch::meta(sizes[0], sizes[1]).unwrap();
    let whole = in_precision(precision);
    let (planned, _) = Step::plan_for_model(&gpu, &model, &whole, &meta).unwrap();
    let budget = StepConfig {
        memory_budget_bytes: Some(planned.arena_bytes() * percent / 100),
        ..whole.clone()
    };
    let (planned_again, blocks) = Step::plan_for_model(&gpu, &model, &budget, &meta).unwrap();
    assert_eq!(blocks, Checkpointing::None);
    let is_half = precision != Precision::F32;
    let runs_gates = planned_again.flops() > planned.flops();
    assert_eq!(runs_gates, !(is_half && percent == 99));
    let adds =
        |call: &Call| call.op.name() == "rms_norm_backward" && call.reads.get("branch").is_some();
    assert_eq!(planned_again.calls().iter().any(adds), is_half);
    let [wanted, got] = [whole, budget].map(|plan| train(&model, &plan, sizes, &gpu, 3));
    assert_eq!(got.losses, wanted.losses);
    for (a, b) in got.weights.iter().zip(&wanted.weights) {
        assert_eq!(distance(a, b), 0.0);
    }
}

/// From a scale that overflows: a step whose gradients are not finite is skipped and changes nothing, the scale follows
/// the scaler's rule, and training continues.
#[rstest]
#[ignore = "needs a CUDA device"]
fn scaled_losses(#[values(None, Some(0.5))] clip_norm: Option<f64>) {
    let gpu = crate::gpu();
    let (model, mut optimizer) = model_on(&meta_of(&config(2, 2, 24, 56), Algorithm::Naive), &gpu);
    let plan = StepConfig {
        loss_scaling: true,
        clip_norm,
        ..in_precision(Precision::F16)
    };
    let mut scale = 2f64.powi(28);
    let mut scaler = GradScaler::new(GradScalerConfig {
        init_scale: scale,
        growth_interval: 3,
        ..Default::default()
    })
    .unwrap();
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let (mut losses, mut in_a_row, mut skipped) = (Vec::new(), 0, 0);
    let (tokens, targets) = batch(97, 2, 37, 0);
    let (tokens, targets) = (
        tokens.to_device(&gpu).unwrap(),
        targets.to_device(&gpu).unwrap(),
    );
    for _ in 0..30 {
        let before = bits(&model);
        let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets));
        let done = done.unwrap();
        losses.push(done.loss);
        assert_eq!(done.updated(), before != bits(&model));
        match done.non_finite {
            None => {
                in_a_row += 1;
                if in_a_row == 3 {
                    (scale, in_a_row) = (2.0 * scale, 0);
                }
            }
            Some(name) => {
                assert!(model.parameters().iter().any(|(known, _)| *known == name));
                (scale, in_a_row, skipped) = (0.5 * scale, 0, skipped + 1);
            }
        }
        assert_eq!(scaler.loss_scale(), scale);
    }
    assert_eq!(optimizer.steps(), 30 - skipped);
    assert!((1..25).contains(&skipped), "{skipped}");
    assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
}

/// A gradient that is not finite is an error that names the parameter, and changes nothing.
#[rstest]
#[ignore = "needs a CUDA device"]
fn gradients_that_cannot_be_clipped(
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let gpu = crate::gpu();
    let meta = meta_of(&config(2, 2, 32, 72), Algorithm::Naive);
    let (model, mut optimizer) = model_on(&meta, &gpu);
    let (_, weight) = &model.parameters()[3];
    let poison = Tensor::full(f32::NAN, weight.shape(), &gpu).unwrap();
    let before = weight.as_tensor().copy().unwrap();
    let plan = StepConfig {
        clip_norm: Some(1.0),
        ..in_precision(precision)
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let (tokens, targets) = batch(97, 2, 37, 0);
    let (tokens, targets) = (
        tokens.to_device(&gpu).unwrap(),
        targets.to_device(&gpu).unwrap(),
    );
    step.run(&mut optimizer, (&tokens, &targets)).unwrap();
    weight.set(&poison).unwrap();
    step.refresh();
    let poisoned = bits(&model);
    for _ in 0..3 {
        refusal(
            step.run(&mut optimizer, (&tokens, &targets)),
            &["the gradient of parameter"],
        );
        assert_eq!(bits(&model), poisoned);
    }
    assert_eq!(optimizer.steps(), 1);
    weight.set(&before).unwrap();
    step.refresh();
    assert!(
        step.run(&mut optimizer, (&tokens, &targets))
            .unwrap()
            .is_finite()
    );
}

/// Weights changed outside the step are noticed: after an eager step automatically, after any other change by
/// `refresh`.
#[test]
#[ignore = "needs a CUDA device"]
fn weights_changed_elsewhere() {
    let gpu = crate::gpu();
    let meta = meta_of(&config(1, 2, 32, 72), Algorithm::Flash);
    let (model, mut optimizer) = model_on(&meta, &gpu);
    let mut step = Step::for_model(&model, &optimizer, &in_precision(Precision::BF16)).unwrap();
    let mut forward = logits_of(&model, Precision::BF16);
    let (tokens, targets) = batch(97, 2, 37, 0);
    let (tokens, targets) = (
        tokens.to_device(&gpu).unwrap(),
        targets.to_device(&gpu).unwrap(),
    );
    for i in 0..6 {
        let loss = model.loss(&tokens, &targets).unwrap();
        if i % 2 == 1 {
            optimizer.step(&loss.backward().unwrap()).unwrap();
        }
        let eager = Precision::BF16
            .run(|| model.loss(&tokens, &targets))
            .unwrap();
        let eager = eager.to_scalar::<f32>().unwrap();
        let planned = match i < 2 {
            true => step.forward_backward((&tokens, &targets)),
            false => step.run(&mut optimizer, (&tokens, &targets)),
        };
        let planned = planned.unwrap();
        assert!((planned - eager).abs() <= 2e-3 * eager, "{planned} {eager}");
        let logits = forward.forward([("tokens", &tokens)]).unwrap();
        let wanted = Precision::BF16.run(|| model.forward(&tokens)).unwrap();
        let on_cpu = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_device(&CPU).unwrap();
        let error = distance(&on_cpu(&logits), &on_cpu(&wanted));
        assert!(error < 2e-2, "{error}");
    }
}

/// Flash attention has no kernel for rows that are not whole vectors; the error names the alternative.
#[rstest]
#[ignore = "needs a CUDA device"]
fn flash_of_odd_heads_is_refused(
    #[values((Precision::F32, 6), (Precision::BF16, 12), (Precision::F16, 4))] odd: (
        Precision,
        usize,
    ),
) {
    let gpu = crate::gpu();
    let (precision, head_dim) = odd;
    let (model, optimizer) = model_on(
        &meta_of(&config(1, 4, head_dim, 72), Algorithm::Flash),
        &gpu,
    );
    let mut step = Step::for_model(&model, &optimizer, &in_precision(precision)).unwrap();
    refusal(step.prepare(Batch::meta(2, 37).unwrap()), &["naive"]);
}

/// In f32 a vector is four elements, so head dimensions that are multiples of four are planned, as on the CPU.
#[rstest]
#[ignore = "needs a CUDA device"]
fn flash_in_f32_takes_heads_of_fours(#[values(4, 12, 100)] head_dim: usize) {
    agree(
        &meta_of(&config(1, 2, head_dim, 56), Algorithm::Flash),
        &in_precision(Precision::F32),
        SIZES,
    );
}

/// A plan in half precision casts each weight before the first step and never in a step: the update writes the copies.
#[test]
#[ignore = "needs a CUDA device"]
fn a_step_casts_no_weight() {
    let gpu = crate::gpu();
    let preset = TransformerConfig::preset("small").unwrap();
    let model = meta_of(&preset, Algorithm::Flash);
    let batch = Batch::meta(4, 256).unwrap();
    let (plan, _) =
        Step::plan_for_model(&gpu, &model, &in_precision(Precision::BF16), batch).unwrap();
    let in_step = plan.first_run_only().end..plan.calls().len();
    let casts = plan.calls()[in_step]
        .iter()
        .filter(|call| call.op.name() == "cast");
    assert_eq!(casts.count(), 0);
    assert!(plan.first_run_only().len() > 7 * 12);
}
