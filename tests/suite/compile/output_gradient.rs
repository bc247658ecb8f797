//! Backward from a gradient of the output that the caller passes, against eager backward from it.

use super::{CPU, batch, config, distance, logits_of, model_and_optimizer};
use crate::check::refusal;
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::model::TransformerConfig;
use tallow::nn::{self, Architecture};
use tallow::precision::Precision;
use tallow::{Result, backward_from, no_grad, ops};

/// Planned gradients of micro-batches are the sum of eager ones.
#[rstest]
fn micro_batches(
    #[values(1, 3)] accumulation: usize,
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(false, true)] tie_embeddings: bool,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let meta = meta_of(
        &TransformerConfig {
            tie_embeddings,
            ..config(2, 2, 24, 56)
        },
        attention,
    );
    let vb = nn::seeded(5, dtype, &CPU);
    let model = with_weights(&meta, vb);
    let step_config = StepConfig {
        accumulation,
        ..Default::default()
    };
    let parameters = model.parameters();
    let mut step = Step::without_optimizer(&CPU, parameters.clone(), &step_config, |inputs| {
        model.forward(&inputs.get("tokens")?)
    })
    .unwrap();
    let (tokens, _) = batch(97, 2 * accumulation, 33, 0);
    let d_logits = Tensor::randn(0f32, 1.0, (2 * accumulation, 33, 97), &CPU).unwrap();
    let d_logits = d_logits.to_dtype(dtype).unwrap();
    let mut wanted: Vec<Option<Tensor>> = vec![None; parameters.len()];
    for i in 0..accumulation {
        let part = |x: &Tensor| x.narrow(0, 2 * i, 2).unwrap().contiguous().unwrap();
        let logits = model.forward(&part(&tokens)).unwrap();
        let store = backward_from(logits, &part(&d_logits)).unwrap();
        for ((_, var), sum) in parameters.iter().zip(&mut wanted) {
            let gradient = store.get(var).unwrap().to_dtype(DType::F32).unwrap();
            *sum = Some(match sum.take() {
                None => gradient,
                Some(sum) => (sum + gradient).unwrap(),
            });
        }
    }
    for run in 0..2 {
        let inputs = [("tokens", &tokens)];
        step.forward_backward_from(inputs, &d_logits).unwrap();
        assert_eq!(step.output().unwrap().dims(), [2, 33, 97]);
        let found = step.gradients().unwrap();
        assert_eq!(found.len(), wanted.len());
        for ((name, found), wanted) in found.iter().zip(&wanted) {
            assert_eq!(found.dtype(), dtype);
            let error = distance(found, wanted.as_ref().unwrap());
            let allowed = if dtype == DType::F32 { 1e-5 } else { 5e-2 };
            assert!(error <= allowed, "{name}, run {run}: {error:.1e}");
        }
    }
}

/// The gradient of a loss may differ from 1.
#[rstest]
fn of_a_loss(#[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture) {
    let meta = meta_of(
        &TransformerConfig {
            architecture,
            ..config(2, 2, 24, 56)
        },
        Algorithm::Flash,
    );
    let (model, optimizer) = model_and_optimizer(&meta);
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let (tokens, targets) = batch(97, 2, 33, 0);
    let loss = step.forward_backward((&tokens, &targets)).unwrap();
    let once = step.gradients().unwrap();
    let two = Tensor::new(2f32, &CPU).unwrap();
    step.forward_backward_from((&tokens, &targets), &two)
        .unwrap();
    let output: f32 = step.output().unwrap().to_scalar().unwrap();
    assert!((output - loss).abs() <= 1e-6 * loss);
    for ((name, found), (_, once)) in step.gradients().unwrap().iter().zip(&once) {
        let error = distance(found, &(once * 2.0).unwrap());
        let is_rounding = name.ends_with("k_proj.bias"); // a softmax does not change with this bias
        assert!(error <= 2e-6 || is_rounding, "{name}: {error:.1e}");
    }
    let forward: f32 = step
        .forward((&tokens, &targets))
        .unwrap()
        .to_scalar()
        .unwrap();
    assert!((forward - loss).abs() <= 1e-6 * loss);
}

/// Slices of one parameter are read, one of them at offset 0, without and with a backward.
#[test]
fn a_part_of_a_parameter() {
    let scale = Var::from_tensor(&Tensor::arange(1f32, 17.0, &CPU).unwrap()).unwrap();
    let apply = |x: &Tensor| -> Result<Tensor> {
        let normed = ops::rms_norm(x, &scale.narrow(0, 0, 8)?, 1e-5)?;
        ops::mul(&normed, &scale.narrow(0, 8, 8)?.broadcast_as((3, 8))?)
    };
    let parameters = vec![("scale".to_string(), scale.clone())];
    let config = StepConfig::default();
    let mut step =
        Step::without_optimizer(&CPU, parameters, &config, |inputs| apply(&inputs.get("x")?))
            .unwrap();
    let x = Tensor::randn(0f32, 1.0, (3, 8), &CPU).unwrap();
    let found = step.forward([("x", &x)]).unwrap();
    let wanted = no_grad(|| apply(&x)).unwrap();
    assert!(distance(&found, &wanted) <= 1e-6);
    let d_out = Tensor::randn(0f32, 1.0, (3, 8), &CPU).unwrap();
    step.forward_backward_from([("x", &x)], &d_out).unwrap();
    let eager = backward_from(apply(&x).unwrap(), &d_out).unwrap();
    let found = &step.gradients().unwrap()[0].1;
    assert!(distance(found, eager.get(&scale).unwrap()) <= 1e-6);
}

/// The gradient's name is reserved, and one tensor may be passed as two inputs.
#[test]
fn inputs() {
    let (model, _) = model_and_optimizer(&meta_of(&config(1, 2, 8, 24), Algorithm::Naive));
    let mut step = logits_of(&model, Precision::F32);
    let (tokens, _) = batch(97, 2, 7, 0);
    let d_logits = Tensor::ones((2, 7, 97), DType::F32, &CPU).unwrap();
    let both = [("tokens", &tokens), ("d_output", &d_logits)];
    refusal(
        step.forward_backward_from(both, &d_logits),
        &["an input is called"],
    );
    step.forward_backward_from([("tokens", &tokens)], &d_logits)
        .unwrap();
    let w = Var::ones((4, 4), DType::F32, &CPU).unwrap();
    let parameters = vec![("w".to_string(), w.clone())];
    let config = StepConfig::default();
    let mut step = Step::without_optimizer(&CPU, parameters, &config, |inputs| {
        ops::linear(&ops::add(&inputs.get("a")?, &inputs.get("b")?)?, &w)
    })
    .unwrap();
    let x = Tensor::ones((2, 4), DType::F32, &CPU).unwrap();
    let found = step.forward([("a", &x), ("b", &x)]).unwrap();
    assert_eq!(found.to_vec2::<f32>().unwrap(), [[8.0; 4]; 2]);
}
