//! Steps planned on a GPU with TF32: their accuracy, and that a plan keeps the arithmetic that it was planned with.

use super::gpu::model_on;
use super::{CPU, batch, bits, config, distance};
use crate::child;
use crate::settings::{in_precision, meta_of};
use candle_core::{Device, Tensor};
use tallow::attention::Algorithm;
use tallow::compile::Step;
use tallow::hardware::set_tf32;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::precision::Precision;

const LENGTH: usize = 64;

/// Returns a model whose matmuls can all use tensor cores.
fn model(attention: Algorithm) -> TransformerLM {
    let config = TransformerConfig {
        vocab_size: 128,
        ..config(2, 2, 64, 256)
    };
    meta_of(&config, attention)
}

fn ids(device: &Device) -> (Tensor, Tensor) {
    let (tokens, targets) = batch(128, 2, LENGTH, 0);
    let on = |ids: Tensor| ids.to_device(device).unwrap();
    (on(tokens), on(targets))
}

/// Returns each parameter's gradient in a planned step.
fn planned(meta: &TransformerLM, device: &Device) -> Vec<Tensor> {
    let (model, optimizer) = model_on(meta, device);
    let mut step = Step::for_model(&model, &optimizer, &in_precision(Precision::F32)).unwrap();
    let (tokens, targets) = ids(device);
    step.forward_backward((&tokens, &targets)).unwrap();
    let gradients = step.gradients().unwrap().into_iter();
    gradients.map(|(_, x)| x.to_device(&CPU).unwrap()).collect()
}

/// Returns each parameter's gradient in an eager step.
fn eager(meta: &TransformerLM, device: &Device) -> Vec<Tensor> {
    let (model, _) = model_on(meta, device);
    let (tokens, targets) = ids(device);
    let gradients = model.loss(&tokens, &targets).unwrap().backward().unwrap();
    let parameters = model.parameters();
    let of = |(_, var): &(String, candle_core::Var)| gradients.get(var).unwrap().to_device(&CPU);
    parameters
        .iter()
        .map(|parameter| of(parameter).unwrap())
        .collect()
}

fn furthest(got: &[Tensor], wanted: &[Tensor]) -> f64 {
    let pairs = got.iter().zip(wanted);
    pairs
        .map(|(got, wanted)| distance(got, wanted))
        .fold(0.0, f64::max)
}

/// The error of TF32 gradients is at most three times that of an eager step in TF32.
#[test]
#[ignore = "needs a CUDA device"]
fn as_exact_as_eager() {
    if child::ran("compile::tf32::as_exact_as_eager") {
        return;
    }
    let gpu = crate::gpu();
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        let model = model(attention);
        let wanted = planned(&model, &CPU);
        let exact = furthest(&planned(&model, &gpu), &wanted);
        set_tf32(&gpu, true).unwrap();
        let judge = furthest(&eager(&model, &gpu), &wanted);
        let rounded = furthest(&planned(&model, &gpu), &wanted);
        set_tf32(&gpu, false).unwrap();
        println!("{attention:?}: exact {exact:.1e}, TF32 {rounded:.1e}, eager {judge:.1e}");
        assert!(exact < 2e-5, "{exact}");
        assert!(
            rounded > 10.0 * exact,
            "{rounded} is no TF32, {exact} is exact"
        );
        assert!(rounded <= 3.0 * judge, "{rounded}, eager {judge}");
    }
}

/// Losses and weights of four steps, launched call by call, recorded and replayed, have the bits of the arithmetic they
/// were planned in, whatever the switch is at run time. Half precision does not depend on it.
#[test]
#[ignore = "needs a CUDA device"]
fn a_plan_keeps_to_it() {
    if child::ran("compile::tf32::a_plan_keeps_to_it") {
        return;
    }
    let gpu = crate::gpu();
    let (tokens, targets) = ids(&gpu);
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        for precision in [Precision::F32, Precision::BF16] {
            let run = |planned_in: bool, run_in: bool| {
                let (model, mut optimizer) = model_on(&model(attention), &gpu);
                set_tf32(&gpu, planned_in).unwrap();
                let mut step =
                    Step::for_model(&model, &optimizer, &in_precision(precision)).unwrap();
                step.prepare((&tokens, &targets)).unwrap();
                set_tf32(&gpu, run_in).unwrap();
                let losses = [0; 4].map(|_| {
                    let loss = step.run(&mut optimizer, (&tokens, &targets)).unwrap();
                    loss.to_bits()
                });
                (losses, bits(&model))
            };
            let (exact, rounded) = (run(false, false), run(true, true));
            let what = format!("{attention:?} {precision}");
            assert!(exact == run(false, true), "{what}: planned exact");
            assert!(rounded == run(true, false), "{what}: planned in TF32");
            assert_eq!(exact == rounded, precision != Precision::F32, "{what}");
        }
    }
}
