//! Checks of the variables that a plan reads and updates.

use super::traced::check_device;
use crate::inplace::storage_address;
use crate::optim::PlannedUpdate;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::HashMap;

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

/// Returns the addresses of the storages that are borrowed mutably, sorted.
///
/// # Errors
/// Two of the tensors on one storage: locking it twice would deadlock.
pub(super) fn exclusive_storages(
    op: &'static str,
    parameters: &[(String, Var)],
    updates: &[PlannedUpdate<'_>],
) -> Result<Vec<usize>> {
    let parameters = parameters.iter().map(|(_, var)| var);
    let states = updates.iter().flat_map(|planned| planned.states).flatten();
    let all = parameters.chain(states.map(|(_, var)| var));
    let mut storages: Vec<usize> = all.map(|var| storage_address(var)).collect();
    storages.sort_unstable();
    match storages.windows(2).any(|pair| pair[0] == pair[1]) {
        true => Err(Error::order(
            op,
            "parameters or their optimizer state share a storage",
            "give each a variable of its own",
        )),
        false => Ok(storages),
    }
}

/// Checks that no argument is on one of the [storages](exclusive_storages) that are borrowed mutably.
pub(super) fn check_arguments(
    op: &'static str,
    storages: &[usize],
    arguments: &[Tensor],
) -> Result<()> {
    let is_exclusive = |x: &Tensor| storages.binary_search(&storage_address(x)).is_ok();
    match arguments.iter().any(is_exclusive) {
        true => Err(Error::order(
            op,
            "the loss reads the optimizer's state, or a parameter in two ways",
            "give the loss a copy of it",
        )),
        false => Ok(()),
    }
}
