//! Checks of the variables that a plan reads and updates.

use super::traced::check_device;
use crate::inplace::storage_address;
use crate::optim::PlannedUpdate;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::{HashMap, HashSet};

/// Checks that variables can be planned. All must be f32, or on the CPU all f64. Variables that are not updated may
/// also be bf16 or f16. All must be contiguous, on one device, and alone on their storage.
pub(super) fn check(
    op: &'static str,
    parameters: &[(String, Var)],
    device: &Device,
    are_updated: bool,
) -> Result<()> {
    let mut storages = HashMap::new();
    let first = parameters.first().map(|(_, var)| var.dtype());
    let dtype = match first {
        Some(DType::F64) if device.is_cpu() => DType::F64,
        _ => DType::F32,
    };
    for (name, var) in parameters {
        check_device(op, name, var, device)?;
        let is_half = matches!(var.dtype(), DType::BF16 | DType::F16);
        let is_taken = var.dtype() == dtype || (is_half && !are_updated);
        if !is_taken || !var.is_contiguous() {
            return Err(Error::DType {
                op,
                expected: match are_updated {
                    true => format!("parameters in {}, contiguous", dtype.as_str()),
                    false => format!("variables in {}, bf16 or f16, contiguous", dtype.as_str()),
                },
                got: format!(
                    "{name} in {}, strides {:?}",
                    var.dtype().as_str(),
                    var.stride()
                ),
                hint: "build the model in f32, or on the CPU in f64; autocast computes in half precision".into(),
            });
        }
        if let Some(other) = storages.insert(storage_address(var), name) {
            return Err(Error::Order {
                op,
                problem: format!("parameters {other} and {name} are two variables on one storage"),
                hint: "tie weights by one variable under both names".into(),
            });
        }
    }
    Ok(())
}

/// Checks that every tensor that is borrowed mutably is alone on its storage; otherwise locking the second would
/// deadlock. Arguments must not share these storages either.
pub(super) fn check_disjoint(
    op: &'static str,
    parameters: &[(String, Var)],
    updates: &[PlannedUpdate],
    arguments: &[Tensor],
) -> Result<()> {
    let refuse = |problem: &str, hint: &str| Err(Error::order(op, problem, hint));
    let mut storages = HashSet::new();
    let parameters = parameters.iter().map(|(_, var)| var.as_tensor());
    let state = updates.iter().flat_map(|planned| &planned.states).flatten();
    let mut exclusive = parameters.chain(state);
    if !exclusive.all(|tensor| storages.insert(storage_address(tensor))) {
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
