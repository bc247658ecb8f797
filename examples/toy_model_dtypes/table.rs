//! The dtype of each tensor of a training step, read from the tensors.

use candle_core::{DType, Device, Tensor};
use tallow::model::ToyModel;
use tallow::precision::Autocast;
use tallow::report::Fields;
use tallow::{Result, autocast, nn, ops};

/// The policies of the table, with their columns' keys and titles.
pub fn policies() -> [(&'static str, &'static str, Autocast); 4] {
    [
        ("cuda_f16", "CUDA, f16", Autocast::cuda(DType::F16)),
        ("cuda_bf16", "CUDA, bf16", Autocast::cuda(DType::BF16)),
        ("cpu_f16", "CPU, f16", Autocast::cpu(DType::F16)),
        ("cpu_bf16", "CPU, bf16", Autocast::cpu(DType::BF16)),
    ]
}

/// Returns a row for each tensor, with a field for each policy.
pub fn rows(seed: u64, device: &Device) -> Result<Vec<Fields>> {
    let mut rows: Vec<Fields> = Vec::new();
    for (key, _, policy) in policies() {
        let dtypes = step(policy, seed, device)?;
        rows.resize(dtypes.len(), Fields::new());
        for (row, (tensor, dtype)) in rows.iter_mut().zip(dtypes) {
            row.insert("tensor", tensor).insert(key, dtype.as_str());
        }
    }
    Ok(rows)
}

/// Runs forward and loss under autocast, backward outside of it, and returns every tensor's name and dtype.
fn step(policy: Autocast, seed: u64, device: &Device) -> Result<Vec<(String, DType)>> {
    let model = ToyModel::new(20, 5, nn::seeded(seed, DType::F32, device))?;
    let x = Tensor::ones((8, 20), DType::F32, device)?;
    let targets = Tensor::zeros(8, DType::U32, device)?;
    let mut seen = Vec::new();
    let mut see = |name: &str, tensor: &Tensor| seen.push((name.to_string(), tensor.dtype()));
    let loss = autocast(policy, || {
        for (name, var) in model.parameters() {
            see(&format!("parameter {name}"), &var);
        }
        see("input", &x);
        let inside = model.activations(&x)?;
        see("fc1", &inside.fc1);
        see("relu", &inside.relu);
        see("layer norm", &inside.ln);
        see("logits inside the model", &inside.logits);
        let logits = model.forward(&x)?;
        see("logits outside the model", &logits);
        ops::cross_entropy(&logits, &targets)
    })?;
    see("loss", &loss);
    let gradients = tallow::backward(loss)?;
    for (name, var) in model.parameters() {
        if let Some(gradient) = gradients.get(&var) {
            see(&format!("gradient {name}"), gradient);
        }
    }
    Ok(seen)
}
