//! A weight as products read it: itself, or in an autocast region its copy in half precision, which is no node of the
//! graph.
//!
//! PyTorch's autocast casts the weight first, and the graph has a node for that. Here the op takes the f32 weight
//! itself and its copy beside it: the products are the same, while the weight's gradient is summed and returned in f32,
//! without a gradient of the copy.

use super::cast::operand;
use super::cast::{cached_copy, cast_castable, cast_weight};
use super::dispatch::{KernelPolicy, current_kernel_policy, has_kernel};
use super::info::OpInfo;
use super::lowering::{Signature, Slot};
use crate::{Result, precision, probe};
use candle_core::{DType, Tensor, TensorId};
use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// Tensors that are weights without being variables.
static MARKED: LazyLock<Mutex<HashSet<TensorId>>> = LazyLock::new(Mutex::default);

fn marked() -> MutexGuard<'static, HashSet<TensorId>> {
    MARKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has ops take a tensor for a weight, for as long as this lives: all of one that ranks have parts of.
#[derive(Default)]
pub(crate) struct WeightMark(OnceLock<TensorId>);

impl WeightMark {
    /// Says which.
    pub fn set(&self, weight: &Tensor) {
        if self.0.set(weight.id()).is_ok() {
            marked().insert(weight.id());
        }
    }
}

impl Drop for WeightMark {
    fn drop(&mut self) {
        if let Some(id) = self.0.get() {
            marked().remove(id);
        }
    }
}

/// The copy of one weight, for the life of an op.
pub(super) struct WeightCopy {
    /// None where the weight is read as it is; and, after forward, where the copy is dropped.
    copy: Mutex<Option<Tensor>>,
    /// The copy's dtype; `None` where there is none.
    dtype: Option<DType>,
    drops: bool,
}

/// x and the weights as `op` takes them here, and the copies that its products read.
///
/// Copies are for f32 variables, and weights that were gathered, that a kernel multiplies by; others are cast as
/// `cast_for` casts.
pub(super) fn with_copies<const N: usize>(
    op: &OpInfo,
    x: &Tensor,
    weights: [&Tensor; N],
) -> Result<(Tensor, [Tensor; N], [WeightCopy; N])> {
    let all: Vec<_> = [x].into_iter().chain(weights).map(Into::into).collect();
    let x = operand(op.op, x)?;
    let mut inputs = weights.map(Tensor::clone);
    for weight in &mut inputs {
        *weight = operand(op.op, weight)?;
    }
    let Some(target) = precision::decide(op.op, &all) else {
        return Ok((x, inputs, weights.map(|_| WeightCopy::none())));
    };
    let in_half = matches!(target, DType::F16 | DType::BF16);
    let x = cast_castable(&x, target)?;
    let copies_weights =
        in_half && current_kernel_policy() != KernelPolicy::Reference && has_kernel(op, &x);
    let mut copies = weights.map(|_| WeightCopy::none());
    for (weight, copy) in inputs.iter_mut().zip(&mut copies) {
        let is_weight = weight.is_variable() || marked().contains(&weight.id());
        match copies_weights && is_weight && weight.dtype() == DType::F32 {
            true => *copy = WeightCopy::new(weight, target)?,
            false => *weight = cast_castable(weight, target)?,
        }
    }
    Ok((x, inputs, copies))
}

/// The copies, each for as long as there is one.
pub(super) fn tensors(copies: &[WeightCopy]) -> Vec<Tensor> {
    copies.iter().filter_map(WeightCopy::tensor).collect()
}

/// The copies for backward: a dropped one is made again of its weight.
pub(super) fn tensors_again(
    copies: &[WeightCopy],
    weights: &[&Tensor],
) -> candle_core::Result<Vec<Tensor>> {
    let copied = copies.iter().zip(weights);
    let copied = copied.filter(|(copy, _)| copy.dtype.is_some());
    copied
        .map(|(copy, weight)| copy.for_backward(weight))
        .collect()
}

/// Says which copies stay for backward, after forward.
pub(super) fn tell_kept(copies: &[WeightCopy]) {
    for copy in copies.iter().filter_map(WeightCopy::get) {
        probe::kept("weight copy", &copy);
    }
}

/// What products read of input `input`, a weight: itself, or its copy in half precision, where its own dtype is another
/// than x's. Copies stand first in what an op reads, in the order of their weights.
pub(super) fn read_weight(signature: &Signature<'_>, input: usize) -> Slot {
    let is_copied = |input: &usize| signature.inputs[*input].dtype != signature.inputs[0].dtype;
    match is_copied(&input) {
        true => Slot::Read((1..input).filter(is_copied).count()),
        false => Slot::Input(input),
    }
}

impl WeightCopy {
    fn none() -> Self {
        Self {
            copy: Mutex::new(None),
            dtype: None,
            drops: false,
        }
    }

    fn new(weight: &Tensor, dtype: DType) -> Result<Self> {
        let drops = !precision::caches_weights();
        let copy = match weight.is_variable() && !drops {
            true => cached_copy(weight, dtype)?,
            false => cast_weight(&weight.detach(), dtype)?, // nobody else reads what was gathered
        };
        Ok(Self {
            copy: Mutex::new(Some(copy)),
            dtype: Some(dtype),
            drops,
        })
    }

    fn get(&self) -> Option<Tensor> {
        let copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        copy.clone()
    }

    /// Whether it goes when forward's product is done.
    pub(super) fn is_dropped(&self) -> bool {
        self.drops
    }

    /// The copy, for as long as there is one.
    pub(super) fn tensor(&self) -> Option<Tensor> {
        self.get()
    }

    /// Drops what is dropped when forward is done.
    pub(super) fn forwarded(&self) {
        if self.drops {
            *self.copy.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The weight as products read it, before forward: for checks.
    pub(super) fn of(&self, weight: &Tensor) -> Tensor {
        self.get().unwrap_or_else(|| weight.clone())
    }

    /// What backward's products read: a dropped copy is recomputed.
    pub(super) fn for_backward(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        match (self.get(), self.dtype) {
            (Some(copy), _) => Ok(copy),
            (None, Some(dtype)) => Ok(cast_weight(&weight.detach(), dtype)?),
            (None, None) => Ok(weight.clone()),
        }
    }
}
