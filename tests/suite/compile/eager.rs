//! Planned steps compute the numbers of eager ones.

use super::{
    CPU, Judge, agree, batch, bits, config, distance, eager_step_in, logits_of, model_and_optimizer,
};
use crate::settings::{in_precision, meta_of, with_weights};
use candle_core::{D, DType, Tensor, Var};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::model::TransformerConfig;
use tallow::nn::{self, Architecture};
use tallow::no_grad;
use tallow::ops::RotaryPairs;
use tallow::precision::Precision;

#[rstest]
fn odd_shapes(
    #[values([1, 1], [3, 1], [1, 64], [2, 123], [3, 65])] sizes: [usize; 2],
    #[values((2, 24), (3, 40), (2, 2))] heads: (usize, usize),
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let (heads, head_dim) = heads;
    let model = meta_of(&config(2, heads, head_dim, 56), attention);
    agree(&model, &in_precision(precision), sizes);
}

/// Grouped heads with both rotary layouts; projections with biases, or norms of q and k.
#[rstest]
fn grouped_heads(
    #[values((4, 2, 24), (6, 1, 40), (2, 2, 8))] heads: (usize, usize, usize),
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
    agree(&model, &in_precision(precision), [2, 67]);
}

/// The presets' proportions with two layers and a sixteenth of the width. The vocabulary exceeds one chunk of logits.
#[rstest]
fn small_versions_of_the_presets(
    #[values("tiny", "small", "medium", "large", "xl", "wide", "2.7b", "10b")] name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let preset = TransformerConfig::preset(name).unwrap();
    let heads = preset.num_heads.div_ceil(8);
    let head_dim = (preset.head_dim() / 4).next_multiple_of(2);
    let model = TransformerConfig {
        num_layers: 2,
        d_model: heads * head_dim,
        num_heads: heads,
        d_ff: preset.d_ff / 16,
        vocab_size: 20_000,
        ..preset
    };
    agree(
        &meta_of(&model, attention),
        &in_precision(precision),
        [2, 70],
    );
}

#[rstest]
fn forward_alone(
    #[values([1, 1], [2, 123])] sizes: [usize; 2],
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let meta = meta_of(&config(3, 2, 24, 56), attention);
    let (model, _) = model_and_optimizer(&meta);
    let mut forward = logits_of(&model, precision);
    for step in 0..2 {
        let (tokens, _) = batch(97, sizes[0], sizes[1], step);
        let eager = |precision: Precision| no_grad(|| precision.run(|| model.forward(&tokens)));
        let wanted = eager(precision).unwrap();
        let got = forward.forward([("tokens", &tokens)]).unwrap();
        assert_eq!(got.dtype(), precision.dtype());
        let (error, allowed) = match precision {
            Precision::F32 => (distance(&got, &wanted), 2e-6),
            // Relative to the error of rounding itself, since now and then a value falls on the other side of a tie.
            _ => {
                let exact = eager(Precision::F32).unwrap();
                (distance(&got, &exact), 1.5 * distance(&wanted, &exact))
            }
        };
        assert!(error <= allowed, "{error:.1e}, {allowed:.1e}");
    }
}

/// Parameters in half precision, which only a step without an optimizer accepts.
#[rstest]
fn forward_in_half(
    #[values(DType::BF16, DType::F16)] dtype: DType,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture,
) {
    let meta = meta_of(
        &TransformerConfig {
            architecture,
            ..config(3, 2, 24, 56)
        },
        attention,
    );
    let of = |dtype| with_weights(&meta, nn::seeded(5, dtype, &CPU));
    let (model, exact) = (of(dtype), of(DType::F32));
    let (tokens, targets) = batch(97, 2, 123, 0);
    let [wanted, exact] = [&model, &exact].map(|model| no_grad(|| model.forward(&tokens)).unwrap());
    let mut step = logits_of(&model, Precision::F32);
    let got = step.forward([("tokens", &tokens)]).unwrap();
    assert_eq!(got.dtype(), dtype);
    let (error, allowed) = (distance(&got, &wanted), 0.5 * distance(&wanted, &exact));
    assert!(error <= allowed, "{error:.1e}, {allowed:.1e}");

    // Also backward from the gradient of the logits.
    let logits = Var::from_tensor(&got).unwrap();
    let loss = tallow::ops::cross_entropy(&logits, &targets).unwrap();
    let d_logits = tallow::backward(loss).unwrap();
    let d_logits = d_logits.get(&logits).unwrap();
    step.forward_backward_from([("tokens", &tokens)], d_logits)
        .unwrap();
    let eager = tallow::backward_from(model.forward(&tokens).unwrap(), d_logits).unwrap();
    let gradients = step.gradients().unwrap();
    assert_eq!(gradients.len(), model.parameters().len());
    let worst = gradients
        .iter()
        .zip(model.parameters())
        .map(|((name, found), (other, var))| {
            assert_eq!((name, found.dtype()), (&other, dtype));
            match name.ends_with("k_proj.bias") {
                true => 0.0, // a bias that shifts all scores of a row alike: both are rounding errors
                false => distance(found, eager.get(&var).unwrap()),
            }
        });
    let worst = worst.fold(0.0, f64::max);
    let allowed = if dtype == DType::BF16 { 5e-2 } else { 1e-2 };
    assert!(worst <= allowed, "{worst:.1e}");
}

/// Logits in the hundreds and a loss below 1 keep their accuracy in both ways of computing the loss.
#[test]
fn confident_logits() {
    let meta = meta_of(&config(1, 2, 16, 56), Algorithm::Naive);
    let confident = || {
        let (model, optimizer) = model_and_optimizer(&meta);
        let mut parameters = model.parameters().into_iter();
        let (_, head) = parameters
            .find(|(name, _)| name == "lm_head.weight")
            .unwrap();
        head.set(&(head.as_tensor() * 70.0).unwrap()).unwrap();
        (model, optimizer)
    };
    let ((eager, _), (planned, mut optimizer)) = (confident(), confident());
    let (tokens, _) = batch(97, 2, 33, 0);
    let logits = eager.forward(&tokens).unwrap().detach();
    let largest: f32 = logits
        .abs()
        .unwrap()
        .max_all()
        .unwrap()
        .to_scalar()
        .unwrap();
    assert!(largest > 150.0, "{largest}");
    let batch = (tokens, logits.argmax(D::Minus1).unwrap());

    let loss = eager.loss(&batch.0, &batch.1).unwrap();
    let store = loss.backward().unwrap();
    let loss: f32 = loss.to_scalar().unwrap();
    let plan = StepConfig {
        optimizer_in_backward: false,
        ..Default::default()
    };
    let mut step = Step::for_model(&planned, &optimizer, &plan).unwrap();
    let got = step.run(&mut optimizer, (&batch.0, &batch.1)).unwrap();
    assert!(
        loss < 1.0 && (got - loss).abs() <= f32::EPSILON * largest, // a difference of logits of this size
        "{got} for {loss}"
    );
    let judge = Judge {
        precision: plan.precision,
        model: &eager,
        batch: &batch,
        what: "confident logits",
    };
    judge.gradients(&step.gradients().unwrap(), &store);
}

/// The loss curves stay close for 200 steps, although each step starts from the rounding errors of the last.
#[rstest]
#[case(Precision::F32, 5e-6)]
#[case(Precision::BF16, 2e-3)]
fn two_hundred_steps(#[case] precision: Precision, #[case] allowed: f32) {
    let meta = meta_of(&config(2, 2, 16, 64), Algorithm::Naive);
    let (eager, mut eager_optimizer) = model_and_optimizer(&meta);
    let (planned, mut planned_optimizer) = model_and_optimizer(&meta);
    for optimizer in [&mut eager_optimizer, &mut planned_optimizer] {
        optimizer.set_learning_rate(1e-3);
    }
    let plan = StepConfig {
        clip_norm: Some(1.0),
        ..in_precision(precision)
    };
    let mut step = Step::for_model(&planned, &planned_optimizer, &plan).unwrap();
    let mut curves = [Vec::new(), Vec::new()];
    for i in 0..200 {
        let batch = batch(97, 4, 32, i % 10);
        let ids = (&batch.0, &batch.1);
        let clip_norm = plan.clip_norm;
        let loss = eager_step_in(precision, &eager, &mut eager_optimizer, ids, clip_norm);
        let got = step.run(&mut planned_optimizer, ids).unwrap();
        // No single step deviates.
        let error = (got - loss).abs() / loss;
        assert!(error <= 2.0 * allowed, "step {i}: {got} for {loss}");
        curves[0].push(got);
        curves[1].push(loss);
    }
    let [got, wanted] = curves.map(|curve| Tensor::new(curve, &CPU).unwrap());
    let error = distance(&got, &wanted);
    assert!(f64::from(allowed) >= error, "{error:.1e}");
    let last: f32 = wanted.get(199).unwrap().to_scalar().unwrap();
    assert!(last < 2.5, "{last}: it has learnt something");
}

/// Batches alternate between more shapes than plans are cached for; each step has the bits of one planned for its shape
/// alone.
#[rstest]
fn shapes_in_turn(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let meta = meta_of(&config(2, 2, 24, 56), attention);
    let (one, mut one_optimizer) = model_and_optimizer(&meta);
    let (other, mut other_optimizer) = model_and_optimizer(&meta);
    let plan = in_precision(precision);
    let mut step = Step::for_model(&one, &one_optimizer, &plan).unwrap();
    assert!(step.plan().is_none());
    let shapes = [
        [2, 37],
        [1, 5],
        [2, 37],
        [3, 64],
        [2, 9],
        [1, 37],
        [2, 37],
        [1, 5],
    ];
    for (i, [batch_size, length]) in shapes.into_iter().enumerate() {
        let (tokens, targets) = batch(97, batch_size, length, i);
        let got = step.run(&mut one_optimizer, (&tokens, &targets)).unwrap();
        let mut alone = Step::for_model(&other, &other_optimizer, &plan).unwrap();
        let wanted = alone.run(&mut other_optimizer, (&tokens, &targets));
        assert_eq!(got.to_bits(), wanted.unwrap().to_bits(), "step {i}");
        assert_eq!(bits(&one), bits(&other), "step {i}");
        let peaks = [&step, &alone].map(|step| step.plan().unwrap().arena_bytes());
        assert_eq!(peaks[0], peaks[1], "step {i}");
    }
    assert_eq!(step.plans().count(), Step::MAX_PLANS);
}
