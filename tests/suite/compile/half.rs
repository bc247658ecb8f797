//! Half precision in planned steps: loss scales, copies of weights, and memory.

use super::{batch, bits, config, distance, model_and_optimizer, plan_of};
use crate::settings::{in_precision, meta_of};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::internals::{BufferRange, Category};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::Checkpointing;
use tallow::optim::{GradScaler, GradScalerConfig, clip_grad_norm};
use tallow::precision::Precision;

fn scaler(init_scale: f64) -> GradScaler {
    let config = GradScalerConfig {
        init_scale,
        growth_interval: 2,
        ..Default::default()
    };
    GradScaler::new(config).unwrap()
}

/// From a scale that overflows: planned and eager training skip the same steps, their scales are equal, and the weights
/// stay close.
#[rstest]
fn scaled_losses(
    #[values(None, Some(0.5))] clip_norm: Option<f64>,
    #[values(1, 2)] accumulation: usize,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let meta = meta_of(&config(2, 2, 24, 56), attention).with_checkpointing(checkpointing);
    let plan = StepConfig {
        clip_norm,
        accumulation,
        loss_scaling: true,
        ..in_precision(Precision::F16)
    };
    let (eager, mut eager_optimizer) = model_and_optimizer(&meta);
    let eager = eager.with_checkpointing(Checkpointing::None);
    let (planned, mut planned_optimizer) = model_and_optimizer(&meta);
    for optimizer in [&mut eager_optimizer, &mut planned_optimizer] {
        optimizer.set_learning_rate(1e-3);
    }
    let scale = 2f64.powi(26);
    let (mut eager_scaler, mut planned_scaler) = (scaler(scale), scaler(scale));
    let mut step = Step::for_model(&planned, &planned_optimizer, &plan).unwrap();
    let mut skipped = 0;
    for i in 0..12 {
        let (tokens, targets) = batch(97, 2 * accumulation, 37, i);
        let before = bits(&planned);
        let ids = (&tokens, &targets);
        let done = step.run_scaled(&mut planned_optimizer, &mut planned_scaler, ids);
        let done = done.unwrap();

        let loss = Precision::F16
            .run(|| eager.loss(&tokens, &targets))
            .unwrap();
        let mut gradients = eager_scaler.scale(&loss).unwrap().backward().unwrap();
        eager_scaler
            .unscale(&mut gradients, &eager.parameters())
            .unwrap();
        let norm = clip_norm
            .map(|norm| clip_grad_norm(&mut gradients, &eager.parameters(), norm).unwrap());
        let stepped = eager_scaler
            .step(&mut eager_optimizer, &mut gradients)
            .unwrap();
        eager_scaler.update().unwrap();

        let loss: f32 = loss.to_scalar().unwrap();
        let error = (done.loss - loss).abs() / loss;
        assert!(error <= 1e-4, "step {i}: {} for {loss}", done.loss);
        assert_eq!(done.updated(), stepped, "step {i}");
        assert_eq!(done.non_finite.is_none(), bits(&planned) != before);
        assert_eq!(planned_scaler.loss_scale(), eager_scaler.loss_scale());
        match (step.gradient_norm(), norm) {
            (None, None) => {}
            (None, Some(_)) => assert!(!stepped),
            (Some(got), Some(wanted)) => {
                assert!(
                    stepped && (got - wanted).abs() <= 5e-3 * wanted,
                    "{got} for {wanted}"
                );
            }
            (Some(_), None) => panic!("nothing is clipped"),
        }
        skipped += usize::from(!stepped);
    }
    assert!((1..12).contains(&skipped), "{skipped}");
    assert_eq!(planned_optimizer.steps(), eager_optimizer.steps());
    assert_eq!(planned_optimizer.steps(), 12 - skipped);
}

/// The scale is divided out again: in f32 it changes nothing, in f16 only what underflows without it.
#[test]
fn a_scale_is_taken_out_again() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let run = |precision, scale: Option<f64>| {
        let (model, mut optimizer) = model_and_optimizer(&meta);
        let plan = StepConfig {
            loss_scaling: true,
            clip_norm: Some(0.5),
            ..in_precision(precision)
        };
        let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
        let (tokens, targets) = batch(97, 2, 37, 0);
        match scale {
            None => step.run(&mut optimizer, (&tokens, &targets)).unwrap(),
            Some(scale) => {
                let mut scaler = scaler(scale);
                let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets));
                done.unwrap().loss
            }
        };
        (bits(&model), step.gradients().unwrap())
    };
    let (wanted, exact) = run(Precision::F32, None);
    assert!(run(Precision::F32, Some(1024.0)).0 == wanted);
    // The scale multiplies the loss's initial gradient, so a tiny scale lets f16 gradients underflow.
    let [lost, kept] = [2f64.powi(-14), 4096.0].map(Some).map(|scale| {
        let (_, gradients) = run(Precision::F16, scale);
        let errors = gradients.iter().zip(&exact);
        errors
            .map(|((_, got), (_, exact))| distance(got, exact))
            .sum::<f64>()
    });
    assert!(kept < 0.1 * lost, "{kept} for {lost}");
}

/// Each weight that matmuls read is copied once per step, whatever the micro-batches and recomputed blocks.
#[rstest]
fn weights_are_copied_once_a_step(
    #[values(1, 3)] accumulation: usize,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
) {
    let model = TransformerConfig::default();
    let meta = TransformerLM::meta(&model).unwrap();
    let meta = meta.with_checkpointing(checkpointing);
    let plan = StepConfig {
        accumulation,
        ..in_precision(Precision::BF16)
    };
    let (plan, _) = plan_of(&meta, &plan, [2, 37]).unwrap();
    let copies = plan.calls().iter().enumerate().filter(|(_, call)| {
        let is_copy =
            |x: &BufferRange| plan.buffer(x.buffer).unwrap().category == Category::WeightCopy;
        call.op.name() == "cast" && is_copy(call.writes.get("y").unwrap())
    });
    let copies: Vec<usize> = copies.map(|(index, _)| plan.runs_per_step(index)).collect();
    assert_eq!(copies, vec![1; 7 * model.num_layers + 1]);
    let matrices = model.num_parameters() as u64
        - model.d_model as u64 * (model.vocab_size as u64 + 2 * model.num_layers as u64 + 1);
    assert_eq!(plan.category_bytes(Category::WeightCopy), 2 * matrices);
}

/// A weight changed between two runs is read again, without `refresh`.
#[test]
fn nothing_is_to_be_refreshed() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let (model, optimizer) = model_and_optimizer(&meta);
    let mut step = Step::for_model(&model, &optimizer, &in_precision(Precision::BF16)).unwrap();
    let (tokens, targets) = batch(97, 2, 37, 0);
    let before = step.forward_backward((&tokens, &targets)).unwrap();
    for (_, var) in model.parameters() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    let after = step.forward_backward((&tokens, &targets)).unwrap();
    let eager = Precision::BF16.run(|| model.loss(&tokens, &targets));
    let eager: f32 = eager.unwrap().to_scalar().unwrap();
    assert!((after - eager).abs() <= 1e-4 * eager && (before - eager).abs() > 1e-3);
}

/// Activations are smaller in bf16, although some stay f32; gradients are not larger.
#[test]
fn activations_are_smaller() {
    let model = TransformerLM::meta(&TransformerConfig::preset("small").unwrap()).unwrap();
    let bytes = |precision| {
        let (plan, _) = plan_of(&model, &in_precision(precision), [8, 37]).unwrap();
        [Category::Activation, Category::Gradient].map(|category| plan.category_bytes(category))
    };
    let ([wide, gradients], [half, same]) = (bytes(Precision::F32), bytes(Precision::BF16));
    assert_eq!(gradients, same);
    assert!(half < 7 * wide / 10, "{half} of {wide}");
}
