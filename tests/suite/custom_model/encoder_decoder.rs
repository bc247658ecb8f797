//! The encoder-decoder of `examples/custom_model` against PyTorch, eagerly and planned.

#[path = "../../../examples/custom_model/model.rs"]
mod model;

use crate::check::{elements, gradients_of};
use crate::golden::{bounds, close, fixture};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use model::EncoderDecoder;
use rstest::rstest;
use std::collections::HashMap;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::graph::{self, Target};
use tallow::memory::{Mode, estimate_graph};
use tallow::nn::Layer;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};

const INPUTS: [&str; 4] = ["source", "visible", "target", "next"];

/// A golden file, written by `fixtures/generate.py encoder_decoder`.
struct Golden {
    hyperparameters: AdamWConfig,
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    fn read() -> Self {
        let (tensors, metadata) = fixture("encoder_decoder_f64");
        Self {
            hyperparameters: serde_json::from_str(&metadata["hyperparameters"]).unwrap(),
            tensors,
        }
    }

    fn model(&self, dtype: DType, device: &Device) -> EncoderDecoder {
        let vb = VarBuilder::from_tensors(self.tensors.clone(), dtype, device);
        EncoderDecoder::new(16, 7, 16, vb).unwrap()
    }

    fn batch(&self, device: &Device) -> [Tensor; 4] {
        INPUTS.map(|name| self.tensors[name].to_device(device).unwrap())
    }

    /// Checks the losses of five steps.
    fn check_losses(&self, dtype: DType, mut step: impl FnMut() -> f64) {
        let bound = if dtype == DType::F64 { 1e-12 } else { 2e-6 };
        for (i, wanted) in elements(&self.tensors["losses"]).into_iter().enumerate() {
            let error = (step() - wanted).abs() / wanted;
            assert!(error <= bound, "step {i}: {error:.2e}");
        }
    }

    /// Checks the gradients that the file has.
    fn check_gradients(&self, gradients: Vec<(String, Tensor)>, bound: f64) {
        let mut checked = 0;
        for (name, gradient) in gradients {
            if let Some(wanted) = self.tensors.get(&format!("grad.{name}")) {
                close(&name, &gradient, wanted, bound);
                checked += 1;
            }
        }
        assert_eq!(checked, 11);
    }
}

#[rstest]
fn eagerly_as_pytorch(
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
) {
    with_kernel_policy(policy, || eager(dtype, &Device::Cpu));
}

fn eager(dtype: DType, device: &Device) {
    let golden = Golden::read();
    let model = golden.model(dtype, device);
    let batch = golden.batch(device);
    let loss = model.loss(batch.each_ref()).unwrap();
    let [_, loss_bound, gradient_bound] = bounds(dtype);
    close("loss", &loss, &golden.tensors["loss"], loss_bound);
    let gradients = gradients_of(model.parameters(), &loss.backward().unwrap());
    golden.check_gradients(gradients, gradient_bound);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    golden.check_losses(dtype, || {
        let loss = model.loss(batch.each_ref()).unwrap();
        let value = elements(&loss)[0];
        optimizer.step(&tallow::backward(loss).unwrap()).unwrap();
        value
    });
}

#[test]
fn planned_as_pytorch() {
    planned(&Device::Cpu);
}

fn planned(device: &Device) {
    let golden = Golden::read();
    let model = golden.model(DType::F32, device);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let mut step = Step::new(&optimizer, &StepConfig::default(), |inputs| {
        let [source, visible, target, next] = INPUTS.map(|name| inputs.get(name));
        model.loss([&source?, &visible?, &target?, &next?])
    })
    .unwrap();
    let tensors = golden.batch(device);
    let batch = || Batch::new(INPUTS.into_iter().zip(&tensors));
    step.forward_backward(batch()).unwrap();
    golden.check_gradients(step.gradients().unwrap(), bounds(DType::F32)[2]);
    golden.check_losses(DType::F32, || {
        step.run(&mut optimizer, batch()).unwrap().into()
    });
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn on_a_gpu() {
    let gpu = crate::gpu();
    eager(DType::F32, &gpu);
    planned(&gpu);
}

/// The trace of meta tensors has all weights, each op has a cost, and the estimate counts them.
#[test]
fn it_is_traced_and_estimated() {
    let model = EncoderDecoder::new(16, 7, 16, graph::weights(DType::F32)).unwrap();
    let input = |name, dtype| graph::input(name, (3, 7), dtype).unwrap();
    let [source, target, next] = ["source", "target", "next"].map(|name| input(name, DType::U32));
    let visible = input("visible", DType::U8);
    let inputs = [&source, &visible, &target, &next];
    let traced = graph::trace(Target::Cpu, || model.loss(inputs)).unwrap();
    assert_eq!(traced.weights().count(), model.parameters().len());
    let costs = tallow::profile::node_costs(&traced);
    assert!(costs.iter().all(|cost| cost.forward.is_some()));
    let estimate = estimate_graph(&traced, Mode::TrainStep).unwrap();
    let parameters = model.parameters().into_iter();
    let elements: usize = parameters.map(|(_, var)| var.elem_count()).sum();
    assert_eq!(estimate.parameter_bytes, 4 * elements as u64);
}
