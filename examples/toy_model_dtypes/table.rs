//! Which dtype each tensor of a training step has, read from the tensors, and what that answers. The tests read both.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use tallow::model::ToyModel;
use tallow::precision::Autocast;
use tallow::report::{Answer, Fields};
use tallow::{Result, autocast, nn, ops};

const BATCH: usize = 8;
const IN: usize = 20;
const OUT: usize = 5;

/// The policies of the table, with their columns' keys and titles.
pub fn policies() -> [(&'static str, &'static str, Autocast); 4] {
    [
        ("cuda_f16", "CUDA, f16", Autocast::cuda(DType::F16)),
        ("cuda_bf16", "CUDA, bf16", Autocast::cuda(DType::BF16)),
        ("cpu_f16", "CPU, f16", Autocast::cpu(DType::F16)),
        ("cpu_bf16", "CPU, bf16", Autocast::cpu(DType::BF16)),
    ]
}

/// One row a tensor, one field a policy.
pub fn rows(seed: u64, device: &Device) -> Result<Vec<Fields>> {
    let mut rows: Vec<Fields> = Vec::new();
    for (key, _, policy) in policies() {
        for (i, (tensor, dtype)) in step(policy, seed, device)?.into_iter().enumerate() {
            if i == rows.len() {
                rows.push(Fields::from_iter([("tensor", tensor)]));
            }
            rows[i].insert(key, dtype.as_str());
        }
    }
    Ok(rows)
}

/// The dtypes that the exercise asks for, those of CUDA's policy in f16.
pub fn answer(rows: &[Fields]) -> Answer {
    let text = |row: &Fields, key: &str| Some(row.get(key)?.as_str()?.to_string());
    let dtypes = |start: &str| {
        let named = rows
            .iter()
            .filter(|row| text(row, "tensor").is_some_and(|tensor| tensor.starts_with(start)));
        let mut dtypes: Vec<String> = named.filter_map(|row| text(row, "cuda_f16")).collect();
        dtypes.dedup();
        dtypes.join(" and ")
    };
    let asked = [
        ("the parameters", "parameter"),
        ("the output of fc1", "fc1"),
        ("the output of layer norm", "layer norm"),
        ("the logits", "logits"),
        ("the loss", "loss"),
        ("the gradients", "gradient"),
    ];
    let asked = asked.map(|(what, tensor)| format!("{what} {}", dtypes(tensor)));
    let question = "Which dtypes does autocast with f16 give?";
    Answer::new(question, format!("On CUDA: {}.", asked.join(", ")))
}

/// Forward and loss under autocast, backward outside of it: every tensor's name and dtype.
fn step(policy: Autocast, seed: u64, device: &Device) -> Result<Vec<(String, DType)>> {
    let vb = nn::seeded(seed, DType::F32, device);
    let model = ToyModel::new(IN, OUT, vb.clone())?;
    let normal = Init::Randn {
        mean: 0.0,
        stdev: 1.0,
    };
    let x = vb.get_with_hints((BATCH, IN), "input", normal)?.detach();
    let targets: Vec<u32> = (0..BATCH as u32).map(|i| i % OUT as u32).collect();
    let targets = Tensor::new(targets, device)?;

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
        let gradient = gradients
            .get(&var)
            .ok_or_else(|| tallow::Error::MissingGradient {
                op: "toy_model_dtypes",
                parameter: name.clone(),
            })?;
        see(&format!("gradient {name}"), gradient);
    }
    Ok(seen)
}
