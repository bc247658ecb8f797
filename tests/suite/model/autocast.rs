//! The model in autocast regions: parameters and gradients in f32, half precision in between.

use super::*;
use rstest::rstest;
use tallow::model::GenerateConfig;
use tallow::nn::{Layer, TransformerBlock};
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::{Autocast, OpClass};
use tallow::{autocast, no_grad};

/// Returns a batch of 2 x 13: inputs and targets.
fn batch() -> (Tensor, Tensor) {
    let both = ids(29, 2, 26);
    let half = |start| both.narrow(1, start, 13).unwrap().contiguous().unwrap();
    (half(0), half(13))
}

fn policies() -> [(DType, Autocast); 4] {
    [DType::BF16, DType::F16]
        .map(|d| [(d, Autocast::cuda(d)), (d, Autocast::cpu(d))])
        .concat()
        .try_into()
        .unwrap()
}

#[rstest]
fn every_parameter_gets_an_f32_gradient_near_that_of_f32(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] kernels: KernelPolicy,
) {
    let model = attending(attention, &mini(), 1, DType::F32);
    let (tokens, targets) = batch();
    let exact_loss = model.loss(&tokens, &targets).unwrap();
    let exact = gradients_of(&exact_loss, model.parameters());
    for (lower, policy) in policies() {
        let run = || {
            autocast(policy.clone(), || {
                assert_eq!(model.forward(&tokens)?.dtype(), lower);
                model.loss(&tokens, &targets)
            })
        };
        let loss = with_kernel_policy(kernels, run).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        let gradients = gradients_of(&loss, model.parameters());
        alive(&gradients);
        let bound = if lower == DType::BF16 { 4e-2 } else { 5e-3 };
        let floor = if lower == DType::BF16 { 1e-3 } else { 1e-4 };
        for ((name, gradient), (_, exact)) in gradients.iter().zip(&exact) {
            assert_eq!(gradient.dtype(), DType::F32, "{name}");
            let distance = distance(gradient, exact);
            assert!(distance < bound, "{name} {policy:?}: {distance:.2e}");
            assert!(
                distance > floor,
                "{name}: {distance:.2e}, was it computed in f32?"
            );
        }
        let [loss, exact] = [&loss, &exact_loss].map(|loss| elements(loss)[0]);
        assert!(
            loss != exact && (loss / exact - 1.0).abs() < bound,
            "{loss} {exact}"
        );
    }
}

fn all_of(gradients: &[(String, Tensor)]) -> Tensor {
    let flat = gradients.iter().map(|(_, g)| g.flatten_all().unwrap());
    Tensor::cat(&flat.collect::<Vec<_>>(), 0).unwrap()
}

/// The residual stream stays in f32 because bf16 costs accuracy, which this test would detect. The errors of one model
/// vary at random, so the means of eight are compared.
#[test]
fn a_residual_stream_in_bf16_is_worse() {
    const MODELS: u64 = 8;
    let config = TransformerConfig {
        num_layers: 6,
        ..mini()
    };
    let (tokens, targets) = batch();
    let [mut right, mut wrong] = [0.0; 2];
    for seed in 0..MODELS {
        let model = TransformerLM::new(&config, seed, &CPU).unwrap();
        let gradients = |policy| {
            let loss = autocast(policy, || model.loss(&tokens, &targets)).unwrap();
            all_of(&gradients_of(&loss, model.parameters()))
        };
        let exact = gradients(Autocast::disabled());
        let policy = Autocast::cuda(DType::BF16);
        let mutant = policy
            .clone()
            .with("embedding", OpClass::Lower)
            .with("add", OpClass::Lower);
        right += distance(&gradients(policy), &exact) / MODELS as f64;
        wrong += distance(&gradients(mutant), &exact) / MODELS as f64;
    }
    assert!(
        right < 3e-2 && 1.2 * right < wrong,
        "{right:.2e} {wrong:.2e}"
    );
}

#[test]
fn a_block_keeps_its_residual_stream_in_f32() {
    let block = TransformerBlock::new(18, 3, 25, 1e-5, None, seeded(DType::F32)).unwrap();
    let x = Var::from_tensor(&numbers(&[2, 5, 18], DType::F32, 1)).unwrap();
    let y = autocast(Autocast::cuda(DType::BF16), || block.forward(&x)).unwrap();
    assert_eq!(y.dtype(), DType::F32);
    let gradients = y.backward().unwrap();
    assert_eq!(gradients.get(&x).unwrap().dtype(), DType::F32);
    for (name, var) in block.parameters() {
        assert_eq!(
            gradients.get(&var).expect(&name).dtype(),
            DType::F32,
            "{name}"
        );
    }
}

#[test]
fn off_means_the_same_bits() {
    let model = mini_model(1);
    let (tokens, targets) = batch();
    let wanted = bits(&model.forward(&tokens).unwrap());
    let off = autocast(Autocast::disabled(), || model.forward(&tokens)).unwrap();
    assert_eq!(bits(&off), wanted);
    let (_, before) = loss_and_gradients(&model, &tokens, &targets);
    autocast(Autocast::cuda(DType::BF16), || {
        model.loss(&tokens, &targets)
    })
    .unwrap();
    let (_, after) = loss_and_gradients(&model, &tokens, &targets);
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(bits(before), bits(after), "{name}");
    }
}

#[test]
fn evaluation_and_generation_work_in_a_region() {
    let model = mini_model(1);
    let (tokens, _) = batch();
    for (lower, policy) in policies() {
        let tracked = autocast(policy.clone(), || model.forward(&tokens)).unwrap();
        let free = autocast(policy.clone(), || no_grad(|| model.forward(&tokens))).unwrap();
        assert!(!free.track_op() && tracked.track_op());
        assert_eq!(bits(&free), bits(&tracked));
        let greedy = GenerateConfig {
            max_new_tokens: 3,
            temperature: 0.0,
            ..Default::default()
        };
        let prompt = [3u32, 1, 4];
        let written = autocast(policy.clone(), || model.generate(&prompt, &greedy)).unwrap();
        let logits = autocast(policy, || model.forward(&Tensor::new(&[prompt], &CPU)?)).unwrap();
        assert_eq!(logits.dtype(), lower);
        let last = elements(&logits.get(0).unwrap().get(2).unwrap());
        let top = (0..29).max_by(|a, b| last[*a].total_cmp(&last[*b]).then(b.cmp(a)));
        assert_eq!(written[0] as usize, top.unwrap());
    }
}
