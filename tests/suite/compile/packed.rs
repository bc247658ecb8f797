//! Packed documents and windows in planned steps equal eager ones, for any documents that a run receives.

use super::attention::{planned, run};
use crate::check::{distance, refusal};
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use tallow::attention::{Algorithm, AttentionConfig, FirstKeys, Mask};
use tallow::compile::{Inputs, PlanKind, Step, StepConfig, Target};
use tallow::graph;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing, ForwardContext};
use tallow::ops::RotaryPairs;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::{Result, autocast};

const SHAPE: (usize, usize) = (2, 200);
/// The target id that is ignored, also the separator of documents.
const IGNORE: u32 = 0;

#[derive(Clone, Copy, Debug)]
struct Case {
    attention: Algorithm,
    kv_heads: usize,
    pairs: RotaryPairs,
    window: Option<usize>,
    checkpointing: Checkpointing,
    precision: Precision,
}

impl Case {
    fn config(&self) -> TransformerConfig {
        TransformerConfig {
            vocab_size: 50,
            context_length: 200,
            d_model: 64,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: Some(self.kv_heads),
            d_ff: 96,
            rope_pairs: self.pairs,
            sliding_window: self.window.and_then(NonZeroUsize::new),
            ..Default::default()
        }
    }

    fn meta(&self) -> TransformerLM {
        meta_of(&self.config(), self.attention).with_checkpointing(self.checkpointing)
    }

    fn model(&self, device: &Device) -> TransformerLM {
        with_weights(&self.meta(), nn::seeded(5, DType::F32, device))
    }

    fn loss(
        &self,
        model: &TransformerLM,
        tokens: &Tensor,
        targets: &Tensor,
        first_keys: &FirstKeys,
    ) -> Result<Tensor> {
        let policy = self
            .precision
            .policy()
            .unwrap_or_else(tallow::precision::Autocast::disabled);
        autocast(policy, || {
            let context = ForwardContext::packed(first_keys.clone());
            model.loss_with(tokens, targets, &context, Some(IGNORE.into()))
        })
    }

    fn loss_of(&self, model: &TransformerLM, inputs: &Inputs) -> Result<Tensor> {
        let first_keys = FirstKeys::new(&inputs.get("first_keys")?)?;
        let (tokens, targets) = (inputs.get("tokens")?, inputs.get("targets")?);
        self.loss(model, &tokens, &targets, &first_keys)
    }

    fn step<'m>(&'m self, model: &'m TransformerLM, optimizer: &Optimizer) -> Step<'m> {
        let loss = |inputs: &Inputs| self.loss_of(model, inputs);
        Step::new(optimizer, &StepConfig::default(), loss).unwrap()
    }
}

/// Returns token ids with some separators, their targets, and the first key of each query.
fn batch(seed: usize, device: &Device) -> (Tensor, Tensor, FirstKeys) {
    let (batch, length) = SHAPE;
    let ids = |i: usize| ((i * 7919 + seed * 104_729) / 13 % 50) as u32;
    let text: Vec<u32> = (0..batch * (length + 1)).map(ids).collect();
    let text = Tensor::from_vec(text, (batch, length + 1), device).unwrap();
    let cut = |first| text.narrow(1, first, length).unwrap().contiguous().unwrap();
    let first_keys = FirstKeys::of_documents(&cut(0), IGNORE).unwrap();
    (cut(0), cut(1), first_keys)
}

fn as_eager(case: Case, device: &Device) {
    let model = case.model(device);
    let optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = case.step(&model, &optimizer);
    let bound = if case.precision == Precision::F32 {
        2e-5
    } else {
        2e-2
    };
    for seed in [1, 2, 3] {
        let (tokens, targets, first_keys) = batch(seed, device);
        let inputs = [
            ("tokens", &tokens),
            ("targets", &targets),
            ("first_keys", first_keys.tensor()),
        ];
        let found = step.forward_backward(inputs).unwrap();
        let loss = case.loss(&model, &tokens, &targets, &first_keys).unwrap();
        let wanted: f32 = loss.to_dtype(DType::F32).unwrap().to_scalar().unwrap();
        assert!(
            (found - wanted).abs() <= bound as f32,
            "{case:?} {seed}: {found} {wanted}"
        );
        let eager = tallow::backward(loss).unwrap();
        let planned: HashMap<String, Tensor> = step.gradients().unwrap().into_iter().collect();
        for (name, parameter) in model.parameters() {
            let wanted = eager.get(&parameter).unwrap();
            let error = distance(&planned[&name], wanted);
            assert!(error <= bound, "{case:?} {seed}: {name} is {error:.1e} off");
        }
    }
}

/// Checks each way to plan attention: grouped heads or not, both rotary layouts, recomputed or not, f32 and bf16.
fn every_case_is_as_eager(attention: Algorithm, window: Option<usize>, device: &Device) {
    for kv_heads in [2, 4] {
        for pairs in [RotaryPairs::Adjacent, RotaryPairs::Halves] {
            for checkpointing in [Checkpointing::None, Checkpointing::Every(NonZeroUsize::MIN)] {
                for precision in [Precision::F32, Precision::BF16] {
                    let case = Case {
                        attention,
                        kv_heads,
                        pairs,
                        window,
                        checkpointing,
                        precision,
                    };
                    as_eager(case, device);
                }
            }
        }
    }
}

#[rstest]
fn planned_is_as_eager(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(30))] window: Option<usize>,
) {
    every_case_is_as_eager(attention, window, &Device::Cpu);
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn planned_is_as_eager_on_a_gpu(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(30))] window: Option<usize>,
) {
    every_case_is_as_eager(attention, window, &crate::gpu());
}

/// On a GPU, flash attention in the model's layout accepts first keys. Planning needs no GPU.
#[test]
fn in_the_models_dimension() {
    let case = Case {
        attention: Algorithm::Flash,
        kv_heads: 2,
        pairs: RotaryPairs::Adjacent,
        window: Some(30),
        checkpointing: Checkpointing::None,
        precision: Precision::F32,
    };
    let model = case.meta();
    let input = |name: &str| graph::input(name, SHAPE, DType::U32).unwrap();
    let [tokens, targets, first_keys] = ["tokens", "targets", "first_keys"].map(input);
    let inputs = [
        ("tokens", &tokens),
        ("targets", &targets),
        ("first_keys", &first_keys),
    ];
    let config = StepConfig::default();
    let loss = |inputs: &Inputs| case.loss_of(&model, inputs);
    let plan = Step::plan_for(Target::Cuda, PlanKind::TrainStep, &config, inputs, loss).unwrap();
    let names: Vec<&str> = plan.calls().iter().map(|call| call.op.name()).collect();
    assert!(names.contains(&"flash_attention"), "{names:?}");
    assert!(!names.contains(&"split_heads"), "{names:?}");
}

#[test]
fn first_keys_that_fall_are_refused_before_a_run() {
    let case = Case {
        attention: Algorithm::Flash,
        kv_heads: 2,
        pairs: RotaryPairs::Adjacent,
        window: None,
        checkpointing: Checkpointing::None,
        precision: Precision::F32,
    };
    let model = case.model(&Device::Cpu);
    let optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = case.step(&model, &optimizer);
    let (tokens, targets, _) = batch(1, &Device::Cpu);
    let falling: Vec<u32> = (0..400).map(|i| if i == 250 { 9 } else { 0 }).collect();
    let falling = Tensor::from_vec(falling, SHAPE, &Device::Cpu).unwrap();
    let inputs = [
        ("tokens", &tokens),
        ("targets", &targets),
        ("first_keys", &falling),
    ];
    refusal(
        step.forward_backward(inputs),
        &["in sequence 1 the first key of query 51"],
    );
    let wide = falling.to_dtype(DType::I64).unwrap();
    let inputs = [
        ("tokens", &tokens),
        ("targets", &targets),
        ("first_keys", &wide),
    ];
    refusal(step.forward_backward(inputs), &["u32"]);
}

/// Compares attention alone, planned with fixed documents, with eager attention.
fn alone_is_as_eager(device: &Device) {
    let lengths = [vec![70, 1, 129], vec![200]];
    let draw = |heads: usize| {
        let x = Tensor::randn(0f32, 1.0, (2, heads, 200, 16), &Device::Cpu).unwrap();
        Var::from_tensor(&x.to_device(device).unwrap()).unwrap()
    };
    let window = Mask::Window(NonZeroUsize::new(31).unwrap());
    for (algorithm, kv_heads, mask) in [
        (Algorithm::Flash, 2, Mask::Causal),
        (Algorithm::Flash, 2, window),
        (Algorithm::Naive, 4, Mask::Causal),
        (Algorithm::Naive, 4, window),
        (Algorithm::Naive, 2, Mask::Full),
    ] {
        for first_keys in [None, Some(FirstKeys::of_lengths(&lengths).unwrap())] {
            let [q, k, v] = [draw(4), draw(kv_heads), draw(kv_heads)];
            let d_out = draw(4).into_inner();
            let attention = AttentionConfig {
                mask,
                first_keys,
                ..Default::default()
            };
            let mut planned = planned(algorithm, [&q, &k, &v], &attention);
            let [planned_out, found @ ..] = run(&mut planned, &d_out);
            let out = algorithm.attend(&q, &k, &v, &attention).unwrap();
            let loss = (&out * &d_out).unwrap().sum_all().unwrap();
            let gradients = tallow::backward(loss).unwrap();
            let pairs = [&q, &k, &v].into_iter().zip(found);
            let pairs = pairs.map(|(x, found)| (found, gradients.get(x).unwrap().clone()));
            for (found, wanted) in pairs.chain([(planned_out, out.detach())]) {
                let error = (found - wanted).unwrap().abs().unwrap().max_all().unwrap();
                let error = error.to_scalar::<f32>().unwrap();
                assert!(error <= 2e-5, "{algorithm} {mask}: {error:.1e}");
            }
        }
    }
}

#[test]
fn attention_alone() {
    alone_is_as_eager(&Device::Cpu);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn attention_alone_on_a_gpu() {
    alone_is_as_eager(&crate::gpu());
}
