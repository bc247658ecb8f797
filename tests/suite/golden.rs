//! The language model and AdamW against PyTorch, from the golden files of `fixtures/`: logits, loss, every gradient,
//! and two curves of ten steps, with each attention algorithm.
//!
//! Both dtypes are compared with the f64 file: f64 must agree up to rounding, f32 within bounds that PyTorch's own f32
//! meets by a wide margin.

use crate::check::{elements, gradients_of, refusal};
use crate::settings::loaded_as;
use candle_core::{DType, Device, Tensor, Var, safetensors};
use candle_nn::VarBuilder;
use rstest::rstest;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tallow::attention::Algorithm;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::ops::{self, KernelPolicy};
use tallow::optim::{AdamWConfig, Optimizer, clip_grad_norm, decay_matrices_only};

const CPU: Device = Device::Cpu;

/// A golden file: PyTorch's inputs and results.
pub struct Golden {
    attention: Algorithm,
    path: PathBuf,
    pub config: TransformerConfig,
    pub hyperparameters: AdamWConfig,
    pub tensors: HashMap<String, Tensor>,
}

/// Returns the tensors and the metadata of `fixtures/{name}.safetensors`.
pub fn fixture(name: &str) -> (HashMap<String, Tensor>, HashMap<String, String>) {
    let bytes = std::fs::read(path_of(name)).unwrap();
    let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = safetensors::load_buffer(&bytes, &CPU).unwrap();
    (tensors, header.metadata().clone().unwrap())
}

fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/{name}.safetensors"))
}

/// Checks that the gradients equal those of the file, all of them and no others.
pub fn close_gradients(
    wanted: &HashMap<String, Tensor>,
    found: impl IntoIterator<Item = (String, Tensor)>,
    bound: f64,
) {
    let mut missing = wanted.keys().filter(|key| key.starts_with("grad.")).count();
    for (name, gradient) in found {
        let key = format!("grad.{name}");
        close(&key, &gradient, &wanted[&key], bound);
        missing -= 1;
    }
    assert_eq!(missing, 0);
}

/// Checks that the weights after some steps equal those of the file, whose names begin with `prefix`.
pub fn close_weights(
    wanted: &HashMap<String, Tensor>,
    parameters: Vec<(String, Var)>,
    prefix: &str,
    bound: f64,
) {
    for (name, var) in parameters {
        let key = format!("{prefix}{name}");
        close(&key, &var, &wanted[&key], bound);
    }
}

impl Golden {
    /// Reads `lm_t13` or `lm_t37` as computed in f64.
    pub fn read(name: &str) -> Self {
        Self::read_as(name, "f64")
    }

    pub fn read_as(name: &str, dtype: &str) -> Self {
        let name = format!("{name}_{dtype}");
        let (tensors, metadata) = fixture(&name);
        let parse =
            |key: &str| -> serde_json::Value { serde_json::from_str(&metadata[key]).unwrap() };
        let mut config = parse("config");
        config["rms_norm_eps"] = parse("hyperparameters")["rms_norm_eps"].clone();
        Self {
            config: serde_json::from_value(config).unwrap(),
            attention: Algorithm::Naive,
            hyperparameters: serde_json::from_value(parse("hyperparameters")).unwrap(),
            tensors,
            path: path_of(&name),
        }
    }

    /// Sets the model's attention algorithm (PyTorch's was naive).
    pub fn with_attention(mut self, attention: Algorithm) -> Self {
        self.attention = attention;
        self
    }

    pub fn get(&self, key: &str) -> &Tensor {
        &self.tensors[key]
    }

    /// Returns the model with the file's weights.
    pub fn model(&self, dtype: DType) -> TransformerLM {
        self.model_on(dtype, &CPU)
    }

    pub fn model_on(&self, dtype: DType, device: &Device) -> TransformerLM {
        let vb = VarBuilder::from_tensors(self.tensors.clone(), dtype, device);
        let model = TransformerLM::from_var_builder(&self.config, vb).unwrap();
        model.with_attention(self.attention).unwrap()
    }
}

/// Checks that `got` is within `bound` of `wanted`, relative by norm, and that the largest difference is within four
/// times `bound` of the largest element.
pub fn close(what: &str, got: &Tensor, wanted: &Tensor, bound: f64) {
    assert_eq!(got.dims(), wanted.dims(), "{what}");
    let (got, wanted) = (elements(got), elements(wanted));
    let differences: Vec<f64> = got.iter().zip(&wanted).map(|(g, w)| g - w).collect();
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let largest = |v: &[f64]| v.iter().fold(0.0, |top: f64, x| top.max(x.abs()));
    let by_norm = norm(&differences) / norm(&wanted);
    let by_element = largest(&differences) / largest(&wanted);
    // Written so that NaN fails.
    assert!(by_norm <= bound, "{what}: {by_norm:.2e} by norm");
    assert!(
        by_element <= 4.0 * bound,
        "{what}: {by_element:.2e} by element"
    );
}

/// Returns the bounds of logits, loss and gradients against PyTorch's f64.
pub fn bounds(dtype: DType) -> [f64; 3] {
    match dtype {
        DType::F64 => [1e-12; 3],
        _ => [2e-6, 1e-6, 5e-6],
    }
}

#[rstest]
fn logits_loss_and_every_gradient(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    logits_loss_and_gradients(
        &Golden::read(name).with_attention(attention),
        &CPU,
        dtype,
        policy,
    );
}

fn logits_loss_and_gradients(golden: &Golden, device: &Device, dtype: DType, policy: KernelPolicy) {
    let model = golden.model_on(dtype, device);
    let (tokens, targets) = (golden.get("tokens"), golden.get("targets"));
    let (tokens, targets) = (tokens.to_device(device), targets.to_device(device));
    let (tokens, targets) = (tokens.unwrap(), targets.unwrap());
    let (logits, loss) = ops::with_kernel_policy(policy, || {
        let logits = model.forward(&tokens).unwrap();
        let loss = ops::cross_entropy(&logits, &targets).unwrap();
        (logits, loss)
    });
    assert_eq!((logits.dtype(), loss.dtype()), (dtype, dtype));
    let [logits_bound, loss_bound, gradient_bound] = bounds(dtype);
    close("logits", &logits, golden.get("logits"), logits_bound);
    close("loss", &loss, golden.get("loss"), loss_bound);

    let gradients = gradients_of(model.parameters(), &loss.backward().unwrap());
    close_gradients(&golden.tensors, gradients, gradient_bound);
}

/// A file of the same names from another program loads.
#[rstest]
fn pytorch_weights_load_from_a_file(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values("f64", "f32")] stored: &str,
    #[values(DType::F64, DType::F32)] dtype: DType,
) {
    let golden = Golden::read_as(name, stored);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let weights: HashMap<String, Tensor> = golden
        .config
        .parameter_shapes()
        .into_iter()
        .map(|(name, _)| (name.clone(), golden.get(&name).clone()))
        .collect();
    safetensors::save(&weights, &path).unwrap();
    let options = loaded_as(dtype);
    let load = |path| TransformerLM::load_with(&golden.config, path, &options, &CPU);
    let model = load(&path).unwrap();
    let logits = model.forward(golden.get("tokens")).unwrap();
    assert_eq!(logits.dtype(), dtype);
    let wanted = Golden::read(name);
    close("logits", &logits, wanted.get("logits"), bounds(dtype)[0]);

    // The golden file itself has more tensors than weights, and unknown ones are refused.
    refusal(load(&golden.path), &["no such weight in"]);
}

/// Takes ten steps on ten batches in a training loop. Compares each batch's loss and gradient norm, and the final
/// weights with those under `prefix`.
fn curve(golden: Golden, device: &Device, dtype: DType, prefix: &str, by_reference: bool) {
    let clipped = prefix == "clipped.";
    let model = golden.model_on(dtype, device);
    let groups = decay_matrices_only(model.parameters(), golden.hyperparameters);
    let mut optimizer = match clipped {
        true => Optimizer::with_groups(groups),
        false => Optimizer::new(model.parameters(), golden.hyperparameters),
    }
    .unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..10 {
        let batch = |key: &str| {
            golden
                .get(key)
                .get(step)
                .unwrap()
                .to_device(device)
                .unwrap()
        };
        let logits = model.forward(&batch("steps.tokens")).unwrap();
        let loss = ops::cross_entropy(&logits, &batch("steps.targets")).unwrap();
        losses.extend(elements(&loss));
        let mut gradients = loss.backward().unwrap();
        if clipped {
            norms.push(clip_grad_norm(&mut gradients, &model.parameters(), 0.5).unwrap());
        }
        if by_reference {
            optimizer.step_reference(&gradients).unwrap();
        } else {
            optimizer.step(&gradients).unwrap();
        }
    }
    let [loss_bound, norm_bound, weight_bound] = match dtype {
        DType::F64 => [1e-12, 1e-11, 1e-10],
        _ => [1e-6, 5e-6, 2e-5],
    };
    for (what, got, bound) in [("losses", losses, loss_bound), ("norms", norms, norm_bound)] {
        if got.is_empty() {
            continue; // nothing was clipped
        }
        let wanted = elements(golden.get(&format!("{prefix}{what}")));
        assert_eq!(got.len(), wanted.len(), "{what}");
        for (step, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            let error = (got - wanted).abs() / wanted;
            assert!(error <= bound, "{what}, step {step}: {error:.2e}");
        }
    }
    let prefix = format!("{prefix}final.");
    close_weights(&golden.tensors, model.parameters(), &prefix, weight_bound);
}

#[rstest]
fn ten_steps_of_adamw(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values("", "clipped.")] prefix: &str,
    #[values(false, true)] by_reference: bool,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let golden = Golden::read(name).with_attention(attention);
    curve(golden, &CPU, dtype, prefix, by_reference);
}

/// Repeats the comparisons on a GPU, with the CPU's bounds.
#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn the_same_on_a_gpu(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let gpu = crate::gpu();
    let golden = || Golden::read(name).with_attention(attention);
    logits_loss_and_gradients(&golden(), &gpu, DType::F32, policy);
    ops::with_kernel_policy(policy, || {
        for prefix in ["", "clipped."] {
            curve(golden(), &gpu, DType::F32, prefix, false);
        }
    });
}
