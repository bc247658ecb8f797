//! What planned steps share: checks of model and batch, and the tables that a plan holds.

use super::config::PlanConfig;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Layer;
use crate::ops::cpu;
use crate::optim::PlannedUpdate;
use crate::optim::inplace::storage_address;
use crate::{Error, Result, nn};
use candle_core::{DType, Tensor, Var};
use std::collections::{HashMap, HashSet};

/// A model that can be planned: its weights in f32 on the CPU or on one GPU, each variable on its own storage, as the
/// configuration lists them. One variable may be several of them (tied).
pub(super) fn check_model(op: &'static str, model: &TransformerLM) -> Result<()> {
    let wanted = model.config().parameter_shapes();
    for ((name, weight), (wanted_name, shape)) in model.weights().iter().zip(&wanted) {
        if name != wanted_name || weight.shape() != shape {
            return Err(Error::Shape {
                op,
                expected: format!("weight {wanted_name} {:?}", shape.dims()),
                got: format!("{name} {:?}", weight.dims()),
                hint: "the model must be what its configuration says".into(),
            });
        }
        if weight.device().is_metal() {
            return Err(Error::Placement {
                op,
                expected: "a model on the CPU or on a CUDA GPU".into(),
                got: format!("{name} on {:?}", weight.device().location()),
                hint: "run it eagerly there: model.loss(), backward(), optimizer.step()".into(),
            });
        }
        if !weight.device().same_device(model.device()) {
            return Err(Error::Placement {
                op,
                expected: "a model on one device".into(),
                got: format!("{name} on {:?}", weight.device().location()),
                hint: "build or load the whole model on one device".into(),
            });
        }
        if weight.dtype() != DType::F32 {
            return Err(Error::DType {
                op,
                expected: "parameters in f32".into(),
                got: format!("{name} in {}", weight.dtype().as_str()),
                hint: "load or build the model in f32, or run it eagerly".into(),
            });
        }
        if !weight.is_contiguous() {
            return Err(Error::Shape {
                op,
                expected: format!("parameter {name} contiguous"),
                got: format!("strides {:?}", weight.stride()),
                hint: "build the model from contiguous weights".into(),
            });
        }
    }
    let mut storages = HashMap::new();
    for (name, var) in model.parameters() {
        if let Some(other) = storages.insert(storage_address(&var), name.clone()) {
            return Err(Error::Order {
                op,
                problem: format!("parameters {other} and {name} are two variables on one storage"),
                hint: "tie weights by one variable under both names".into(),
            });
        }
    }
    Ok(())
}

/// A sequence that the model's positions reach.
pub(super) fn check_length(model: &TransformerConfig, config: &PlanConfig) -> Result<()> {
    config.validate()?;
    if config.sequence_length <= model.context_length {
        return Ok(());
    }
    Err(Error::Config {
        config: "PlanConfig",
        field: "sequence_length",
        expected: format!(
            "at most the model's context_length {}",
            model.context_length
        ),
        got: config.sequence_length.to_string(),
        hint: "shorten the sequence, or build the model with a longer context_length".into(),
    })
}

/// Cosines and sines of T positions, (T, Dh/2) each: the model's own tables, rounded to half precision where queries and keys
/// come in it, as eager rope does.
pub(super) fn angles(model: &TransformerConfig, config: &PlanConfig) -> Result<[Vec<f32>; 2]> {
    let (theta, head_dim, length) = (model.rope_theta, model.head_dim(), config.sequence_length);
    let device = &candle_core::Device::Cpu;
    let tables = nn::RotaryEmbedding::new(theta, head_dim, length, DType::F32, device)?;
    let [cos, sin] = tables.tables().map(|table| {
        let rounded = table.to_dtype(config.precision.dtype())?;
        rounded.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    });
    Ok([cos?, sin?])
}

/// The ids of a batch of the planned shape, each in the vocabulary.
pub(super) fn ids(
    op: &'static str,
    what: &str,
    tensor: &Tensor,
    sequences: usize,
    length: usize,
    vocab_size: usize,
) -> Result<Vec<u32>> {
    if tensor.dims() != [sequences, length] {
        return Err(Error::Shape {
            op,
            expected: format!("{what} ({sequences}, {length}), as planned"),
            got: format!("{:?}", tensor.dims()),
            hint:
                "plan another step for another shape: batch_size, sequence_length and accumulation \
                   of PlanConfig"
                    .into(),
        });
    }
    cpu::ids(op, tensor, vocab_size, None)
}

/// Every tensor that is lent for writing must be alone on its storage, or lending the second would wait for the first for ever;
/// nor may an argument be on one of these.
pub(super) fn check_apart(
    op: &'static str,
    parameters: &[(String, Var)],
    updates: &[PlannedUpdate],
    arguments: &[&Tensor],
) -> Result<()> {
    let refuse = |problem: &str, hint: &str| {
        Err(Error::Order {
            op,
            problem: problem.into(),
            hint: hint.into(),
        })
    };
    let mut storages = HashSet::new();
    let parameters = parameters.iter().map(|(_, var)| var.as_tensor());
    let state = updates
        .iter()
        .flat_map(|planned| [&planned.exp_avg, &planned.exp_avg_sq]);
    let mut lent = parameters.chain(state);
    if !lent.all(|tensor| storages.insert(storage_address(tensor))) {
        let problem = "parameters or their optimizer state share a storage";
        return refuse(problem, "give each a variable of its own");
    }
    let mut arguments = arguments.iter();
    match arguments.any(|x| storages.contains(&storage_address(x))) {
        true => refuse(
            "the loss reads the optimizer's state, or a parameter in two ways",
            "give the loss a copy of it",
        ),
        false => Ok(()),
    }
}
