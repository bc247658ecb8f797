//! Custom models of this crate's layers and ops: a GPT-2 against `transformers`, the encoder-decoder of
//! `examples/custom_model` against PyTorch, and a block with parallel branches and a mixture of experts against finite
//! differences. All are also traced.

mod encoder_decoder;
pub(crate) mod gpt2;
mod mixture;

use crate::check::{elements, gradients_of};
use crate::golden::{bounds, close, close_gradients, close_weights, fixture};
#[cfg(feature = "cuda")]
use crate::settings::{in_precision, with_lr};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gpt2::{Gpt2, Gpt2Config};
use rstest::rstest;
use std::collections::{BTreeSet, HashMap};
use tallow::attention::Algorithm;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::graph::{self, Target};
use tallow::nn::Layer;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Autocast;
#[cfg(feature = "cuda")]
use tallow::precision::Precision;
use tallow::profile::{self, Cost};

/// A golden file, written by `fixtures/generate.py gpt2`.
struct Golden {
    config: Gpt2Config,
    hyperparameters: AdamWConfig,
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    fn read(attention: Algorithm) -> Self {
        let (tensors, metadata) = fixture("gpt2_f64");
        let config: HashMap<String, usize> = serde_json::from_str(&metadata["config"]).unwrap();
        let config = Gpt2Config {
            vocab_size: config["vocab_size"],
            n_positions: config["n_positions"],
            n_embd: config["n_embd"],
            n_layer: config["n_layer"],
            n_head: config["n_head"],
            attention,
        };
        Self {
            config,
            hyperparameters: serde_json::from_str(&metadata["hyperparameters"]).unwrap(),
            tensors,
        }
    }

    fn model(&self, dtype: DType, device: &Device) -> Gpt2 {
        let vb = VarBuilder::from_tensors(self.tensors.clone(), dtype, device);
        Gpt2::new(self.config.clone(), vb).unwrap()
    }

    /// Returns tokens and targets (B, T) of a step.
    fn batch(&self, step: usize, device: &Device) -> [Tensor; 2] {
        ["tokens", "targets"].map(|key| {
            let batch = self.tensors[key].get(step).unwrap();
            batch.to_device(device).unwrap()
        })
    }
}

fn logits_loss_and_gradients(golden: &Golden, device: &Device, dtype: DType) {
    let model = golden.model(dtype, device);
    let [tokens, targets] = golden.batch(0, device);
    let logits = model.forward(&tokens).unwrap();
    let loss = model.loss(&tokens, &targets).unwrap();
    assert_eq!((logits.dtype(), loss.dtype()), (dtype, dtype));
    let wanted = |key: &str| &golden.tensors[key];
    let [logits_bound, loss_bound, gradient_bound] = bounds(dtype);
    close("logits", &logits, wanted("logits"), logits_bound);
    close("loss", &loss, wanted("loss"), loss_bound);

    let gradients = gradients_of(model.parameters(), &loss.backward().unwrap());
    close_gradients(&golden.tensors, gradients, gradient_bound);
}

fn five_steps(golden: &Golden, device: &Device, dtype: DType) {
    let model = golden.model(dtype, device);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let [loss_bound, weight_bound] = match dtype {
        DType::F64 => [1e-12, 1e-10],
        _ => [1e-6, 2e-5],
    };
    let wanted = elements(&golden.tensors["losses"]);
    assert_eq!(wanted.len(), 5);
    for (step, wanted) in wanted.into_iter().enumerate() {
        let [tokens, targets] = golden.batch(step, device);
        let loss = model.loss(&tokens, &targets).unwrap();
        optimizer.step(&loss.backward().unwrap()).unwrap();
        let error = (elements(&loss)[0] - wanted).abs() / wanted;
        assert!(error <= loss_bound, "step {step}: {error:.2e}");
    }
    close_weights(&golden.tensors, model.parameters(), "final.", weight_bound);
}

#[rstest]
fn gpt2_is_that_of_transformers(
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let golden = Golden::read(attention);
    with_kernel_policy(policy, || {
        logits_loss_and_gradients(&golden, &Device::Cpu, dtype);
        five_steps(&golden, &Device::Cpu, dtype);
    });
}

#[rstest]
fn gpt2_planned_is_that_of_transformers(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    planned(&Golden::read(attention), &Device::Cpu);
}

/// Checks loss, gradients and five steps of a plan that was made from the trace.
fn planned(golden: &Golden, device: &Device) {
    let model = golden.model(DType::F32, device);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let [tokens, targets] = golden.batch(0, device);
    let loss = |inputs: &Inputs| model.loss(&inputs.get("tokens")?, &inputs.get("targets")?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), loss).unwrap();
    let [_, loss_bound, gradient_bound] = bounds(DType::F32);
    let loss = step
        .forward_backward([("tokens", &tokens), ("targets", &targets)])
        .unwrap();
    let wanted = elements(&golden.tensors["loss"])[0];
    assert!((f64::from(loss) - wanted).abs() <= loss_bound * wanted);
    close_gradients(&golden.tensors, step.gradients().unwrap(), gradient_bound);
    for (i, wanted) in elements(&golden.tensors["losses"]).into_iter().enumerate() {
        let [tokens, targets] = golden.batch(i, device);
        let inputs = [("tokens", &tokens), ("targets", &targets)];
        let loss = step.run(&mut optimizer, inputs).unwrap();
        let error = (f64::from(loss) - wanted).abs() / wanted;
        assert!(error <= 1e-6, "step {i}: {error:.2e}");
    }
    close_weights(&golden.tensors, model.parameters(), "final.", 2e-5);
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn gpt2_on_a_gpu(
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let gpu = crate::gpu();
    let golden = Golden::read(attention);
    with_kernel_policy(policy, || {
        logits_loss_and_gradients(&golden, &gpu, DType::F32);
        five_steps(&golden, &gpu, DType::F32);
    });
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn gpt2_planned_on_a_gpu(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    planned(&Golden::read(attention), &crate::gpu());
}

/// Half precision on a GPU, with heads that flash attention accepts: losses are near the eager ones', and replayed runs
/// equal the first.
#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn gpt2_planned_in_half_on_a_gpu(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::BF16, Precision::F16)] precision: Precision,
) {
    let gpu = crate::gpu();
    let config = Gpt2Config {
        vocab_size: 300,
        n_positions: 64,
        n_embd: 128,
        n_layer: 3,
        n_head: 2,
        attention,
    };
    let ids = |shift: u32| {
        let ids = (0..4 * 64u32).map(|i| (i * i + shift) % 300);
        let ids = Tensor::from_iter(ids, &gpu).unwrap();
        ids.reshape((4, 64)).unwrap()
    };
    let (tokens, targets) = (ids(0), ids(1));
    let model = || Gpt2::new(config.clone(), tallow::nn::seeded(1, DType::F32, &gpu)).unwrap();
    let hyperparameters = with_lr(1e-3);
    let eager = model();
    let mut optimizer = Optimizer::new(eager.parameters(), hyperparameters).unwrap();
    let wanted = [0; 6].map(|_| {
        let loss = precision.run(|| eager.loss(&tokens, &targets)).unwrap();
        optimizer.step(&loss.backward().unwrap()).unwrap();
        loss.to_dtype(DType::F32)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
    });
    let config = in_precision(precision);
    let mut runs = Vec::new();
    for _ in 0..2 {
        let planned = model();
        let mut optimizer = Optimizer::new(planned.parameters(), hyperparameters).unwrap();
        let loss = |inputs: &Inputs| planned.loss(&inputs.get("tokens")?, &inputs.get("targets")?);
        let mut step = Step::new(&optimizer, &config, loss).unwrap();
        let losses = [0; 6].map(|_| {
            let inputs = [("tokens", &tokens), ("targets", &targets)];
            step.run(&mut optimizer, inputs).unwrap()
        });
        for (got, wanted) in losses.iter().zip(wanted) {
            assert!(
                (got - wanted).abs() <= 5e-3 * wanted,
                "{losses:?} {wanted:?}"
            );
        }
        runs.push(losses.map(f32::to_bits));
    }
    assert_eq!(runs[0], runs[1]);
}

/// Returns the configuration of the smallest published GPT-2.
fn small() -> Gpt2Config {
    Gpt2Config {
        vocab_size: 50_257,
        n_positions: 1024,
        n_embd: 768,
        n_layer: 12,
        n_head: 12,
        attention: Algorithm::Flash,
    }
}

fn traced(config: &Gpt2Config, batch: usize, length: usize) -> graph::Graph {
    let model = Gpt2::new(config.clone(), graph::weights(DType::F32)).unwrap();
    let input = |name| graph::input(name, (batch, length), DType::U32).unwrap();
    let (tokens, targets) = (input("tokens"), input("targets"));
    graph::trace(Target::Cpu, || model.loss(&tokens, &targets)).unwrap()
}

#[test]
fn gpt2_is_traced_and_counted() {
    let (batch, length) = (2, 1024);
    let traced = traced(&small(), batch, length);
    // Weights by name, the tied one once: 124,439,808 parameters, the count of `transformers`.
    let weights: usize = traced
        .weights()
        .map(|(id, _)| traced.get(id).unwrap().elements())
        .sum();
    assert_eq!(weights, 124_439_808);
    let names: BTreeSet<&str> = traced.weights().map(|(_, name)| name).collect();
    let model = Gpt2::new(small(), graph::weights(DType::F32)).unwrap();
    let parameters = model.parameters();
    assert_eq!(
        names,
        parameters.iter().map(|(name, _)| name.as_str()).collect()
    );
    assert!(traced.to_string().contains("= h.11/mlp/gelu_tanh ("));

    // Matmuls by hand, per token: projections 12 D^2 per block, scores and values 2 T D, the head V D, twice each.
    let (d, v, tokens) = (768.0, 50_257.0, (batch * length) as f64);
    let forward = 2.0 * tokens * (12.0 * (12.0 * d * d + 2.0 * length as f64 * d) + v * d);
    let costs = profile::node_costs(&traced);
    let sum = |cost: fn(&profile::NodeCost) -> Option<Cost>| -> f64 {
        costs
            .iter()
            .filter_map(cost)
            .map(|cost| cost.matmul_flops)
            .sum()
    };
    assert_eq!(sum(|cost| cost.forward), forward);
    assert_eq!(sum(|cost| cost.backward), 2.0 * forward);
    for cost in &costs {
        assert!(cost.forward.is_some(), "no formula for {}", cost.node.op);
    }
}

/// A trace has the ops of a run, in any precision.
#[rstest]
fn what_is_traced_is_what_runs(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(DType::BF16))] half: Option<DType>,
) {
    let golden = Golden::read(attention);
    let around = |f: &dyn Fn() -> tallow::Result<Tensor>| match half {
        Some(dtype) => tallow::autocast(Autocast::cpu(dtype), f),
        None => f(),
    };
    let real = golden.model(DType::F32, &Device::Cpu);
    let [tokens, targets] = golden.batch(0, &Device::Cpu);
    let loss = around(&|| real.loss(&tokens, &targets)).unwrap();
    assert_eq!(loss.dims(), [0; 0]);
    let of_real = graph::trace(Target::Cpu, || around(&|| real.loss(&tokens, &targets))).unwrap();
    let meta = Gpt2::new(golden.config.clone(), graph::weights(DType::F32)).unwrap();
    let input = |name| graph::input(name, tokens.shape(), DType::U32).unwrap();
    let (x, y) = (input("tokens"), input("targets"));
    let of_meta = graph::trace(Target::Cpu, || around(&|| meta.loss(&x, &y))).unwrap();
    let lines = |graph: &graph::Graph| -> Vec<(String, Vec<usize>, DType)> {
        let nodes = graph.nodes().map(|node| {
            let output = graph.get(node.output).unwrap();
            (node.path.clone(), output.shape.clone(), output.dtype)
        });
        nodes.collect()
    };
    assert_eq!(lines(&of_real), lines(&of_meta));
    let ops_of = |name: &str| of_meta.nodes().filter(|node| node.op == name).count();
    let layers = golden.config.n_layer;
    assert_eq!(
        [ops_of("linear_bias"), ops_of("gelu_tanh")],
        [4 * layers, layers]
    );
    assert_eq!(ops_of("contiguous"), 3 * layers); // slices of one matmul for q, k and v
    assert_eq!(ops_of("layer_norm"), 2 * layers + 1);
}

/// The model refuses more tokens than it has positions.
#[test]
fn too_many_tokens_are_refused() {
    let golden = Golden::read(Algorithm::Naive);
    let model = golden.model(DType::F32, &Device::Cpu);
    let tokens =
        Tensor::zeros((1, golden.config.n_positions + 1), DType::U32, &Device::Cpu).unwrap();
    let error = model.forward(&tokens).unwrap_err().to_string();
    assert!(
        error.starts_with("embedding") && error.contains("16"),
        "{error}"
    );
}
