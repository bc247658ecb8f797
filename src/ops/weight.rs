//! Weights as matmuls read them: the weight itself, or in an autocast region its copy in half precision, which is not a
//! node of the graph.
//!
//! PyTorch's autocast casts the weight first, and the graph has a node for the cast. Here the op has the f32 weight as
//! input and its copy as extra input. The matmuls are the same, but the weight's gradient is summed and returned in
//! f32, without a gradient of the copy.

use super::cast::operand;
use super::cast::{cached_copy, cast_castable, cast_weight};
use super::dispatch::{KernelPolicy, current_kernel_policy, has_kernel};
use super::info::OpInfo;
use super::lowering::{Signature, Slot};
use crate::{Result, precision};
use candle_core::{DType, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The copy that matmuls read instead of a weight, for the life of an op; `None` if they read the weight itself.
pub(super) struct WeightCopy(Option<Box<Copied>>);

struct Copied {
    /// The copy; `None` after forward if it is freed then.
    copy: Mutex<Option<Tensor>>,
    dtype: DType,
    /// Whether the copy is not cached, and so is freed after forward.
    freed_after_forward: bool,
}

/// Returns x and the weights as inputs of `op`, and the copies that its matmuls read.
///
/// f32 variables get a copy if a kernel multiplies by them in half precision; other weights are cast as in `cast_for`.
pub(super) fn with_copies<const N: usize>(
    op: &OpInfo,
    x: &Tensor,
    weights: [&Tensor; N],
) -> Result<(Tensor, [Tensor; N], [WeightCopy; N])> {
    let all: Vec<_> = [x].into_iter().chain(weights).map(Into::into).collect();
    let mut x = operand(op.op, x)?;
    let mut inputs = weights.map(Tensor::clone);
    for weight in &mut inputs {
        *weight = operand(op.op, weight)?;
    }
    let target = precision::decide(op.op, &all);
    let cast = |x: &Tensor| match target {
        Some(dtype) => cast_castable(x, dtype),
        None => Ok(x.clone()),
    };
    x = cast(&x)?;
    let has_kernel = current_kernel_policy() != KernelPolicy::Reference && has_kernel(op, &x);
    let in_half = target.filter(|dtype| matches!(dtype, DType::F16 | DType::BF16));
    let mut copies = weights.map(|_| WeightCopy::uncopied());
    for (weight, copy) in inputs.iter_mut().zip(&mut copies) {
        let is_copied = has_kernel && weight.is_variable() && weight.dtype() == DType::F32;
        match in_half {
            Some(dtype) if is_copied => *copy = WeightCopy::cast(weight, dtype)?,
            _ => *weight = cast(weight)?,
        }
    }
    Ok((x, inputs, copies))
}

/// Returns the copies that are alive.
pub(super) fn tensors(copies: &[WeightCopy]) -> Vec<Tensor> {
    copies.iter().filter_map(WeightCopy::get).collect()
}

/// Returns the copies for backward; freed ones are made again.
pub(super) fn tensors_for_backward(
    copies: &[WeightCopy],
    weights: &[&Tensor],
) -> candle_core::Result<Vec<Tensor>> {
    let copied = copies.iter().zip(weights);
    let copied = copied.filter_map(|(copy, weight)| copy.for_backward(weight).transpose());
    Ok(copied.collect::<Result<_>>()?)
}

/// Returns the slot that matmuls read for the weight `input`: the weight itself, or its copy if its dtype differs from
/// x's. Copies are the first extra inputs of an op, in the order of their weights.
pub(super) fn read_weight(signature: &Signature<'_>, input: usize) -> Slot {
    let is_copied = |input: &usize| signature.inputs[*input].dtype != signature.inputs[0].dtype;
    match is_copied(&input) {
        true => Slot::ExtraInput((1..input).filter(is_copied).count()),
        false => Slot::Input(input),
    }
}

impl WeightCopy {
    fn uncopied() -> Self {
        Self(None)
    }

    fn cast(weight: &Tensor, dtype: DType) -> Result<Self> {
        let caches = precision::caches_weights();
        let copy = match caches {
            true => cached_copy(weight, dtype)?,
            false => cast_weight(&weight.detach(), dtype)?,
        };
        Ok(Self(Some(Box::new(Copied {
            dtype: copy.dtype(),
            copy: Mutex::new(Some(copy)),
            freed_after_forward: !caches,
        }))))
    }

    fn get(&self) -> Option<Tensor> {
        self.0.as_ref()?.lock().clone()
    }

    /// Frees the copy after forward, unless it is cached.
    pub(super) fn free_after_forward(&self) {
        if let Some(copied) = &self.0
            && copied.freed_after_forward
        {
            *copied.lock() = None;
        }
    }

    /// Returns the weight as matmuls read it, for checks before forward.
    pub(super) fn of(&self, weight: &Tensor) -> Tensor {
        self.get().unwrap_or_else(|| weight.clone())
    }

    /// Returns the copy that backward's matmuls read; a freed one is made again.
    fn for_backward(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let Some(copied) = &self.0 else {
            return Ok(None);
        };
        if let Some(copy) = self.get() {
            return Ok(Some(copy));
        }
        cast_weight(&weight.detach(), copied.dtype).map(Some)
    }
}

impl Copied {
    fn lock(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
