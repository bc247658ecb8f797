//! Differentiable casts: by hand, by the policy of an autocast region, and of weights once per region.

use super::dispatch::{self, Path, choose_where};
use super::info::OpInfo;
use super::lowering::CONVERTED;
use super::operand::{inside_storage, is_supported_float, sums_in_half, without_repeats};
use super::record::{CallSpec, by_kernels, composed, input};
use crate::grad::is_grad_enabled;
use crate::graph;
use crate::precision;
use crate::{Error, Result};
use candle_core::{DType, Tensor, TensorId};
use std::cell::RefCell;
use std::collections::HashMap;

/// The name of a weight's cast in profiles and memory records: its copy lives as long as an activation, but is not one.
pub(crate) const WEIGHT_CAST: &str = "weight_cast";

/// Casts `x` to another floating-point dtype, rounded to nearest (ties to even), as candle's `to_dtype` does. Backward
/// casts the gradient to x's dtype. Saved for backward: nothing.
///
/// Casts between f32, f16 and bf16 run as a kernel, on a GPU or on all threads of the CPU; others are candle's own
/// conversion.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[1.001f32, 2.5], &Device::Cpu)?;
/// let y = ops::cast(&x, DType::BF16)?;
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec1::<f32>()?, [1.0, 2.5]); // 8 bits of a number are kept
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().dtype(), DType::F32);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not f16, bf16, f32 or f64: the gradient would be lost silently. x may be in one of these or an
/// integer.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match x.is_variable() {
        true => cast_weight(x, dtype),
        false => cast_as(&CAST, x, dtype),
    }
}

/// Runs [`cast`] of a weight, or of a weight detached from the graph.
pub(super) fn cast_weight(weight: &Tensor, dtype: DType) -> Result<Tensor> {
    cast_as(&WEIGHT_CAST_INFO, weight, dtype)
}

fn cast_as(op: &'static OpInfo, x: &Tensor, dtype: DType) -> Result<Tensor> {
    if is_supported_float(dtype) && (x.dtype().is_int() || is_supported_float(x.dtype())) {
        let x = &operand(op.op, x)?;
        if has_kernel(x, dtype) && choose_where("cast", x, true)? == Path::Kernel {
            return by_kernels(op, CallSpec::new(x.shape(), dtype), [x]);
        }
        let x = &input(x);
        return match x.dtype() == dtype {
            true => Ok(x.clone()),
            false => composed(op, &[x], (x.shape(), dtype), || Ok(x.to_dtype(dtype)?)),
        };
    }
    Err(Error::DType {
        op: "cast",
        expected: "a floating-point dtype, f16, bf16, f32 or f64".into(),
        got: format!("a cast from {} to {}", x.dtype().as_str(), dtype.as_str()),
        hint: "to_dtype makes integers; they have no gradient".into(),
    })
}

fn has_kernel(x: &Tensor, dtype: DType) -> bool {
    let known = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    dispatch::has_kernel(&CAST, x) && x.dtype() != dtype && known(x.dtype()) && known(dtype)
}

/// Returns `x` as `op` can read it, [inside its storage](inside_storage). In half precision, the gradient of a
/// broadcast view is summed in f32 and rounded once.
///
/// # Errors
/// Those of [`inside_storage`].
pub(crate) fn operand(op: &'static str, x: &Tensor) -> Result<Tensor> {
    let x = inside_storage(op, x)?;
    match sums_in_half(&x) {
        true => cast(&widened_broadcast(&x)?, x.dtype()),
        false => Ok(x),
    }
}

/// Returns a half-precision broadcast view in f32, broadcast again after the cast: its gradient is summed in f32. The
/// first repeat receives the whole gradient and the others zeros, because candle cannot round the sum.
pub(super) fn widened_broadcast(x: &Tensor) -> Result<Tensor> {
    let wide = cast(&without_repeats(x)?, DType::F32)?;
    Ok(wide.broadcast_as(x.shape())?)
}

/// GPU kernels accept rows of any width.
pub(crate) const CAST: OpInfo = OpInfo::new("cast")
    .on_gpu_up_to(usize::MAX)
    .moving()
    .planned_composed(CONVERTED);

const WEIGHT_CAST_INFO: OpInfo = OpInfo::new(WEIGHT_CAST)
    .moving()
    .planned_composed(CONVERTED);

pub(super) const INFOS: &[OpInfo] = &[CAST, WEIGHT_CAST_INFO];

/// Casts `inputs` to the dtypes that `op` needs here. This crate's ops do this first; call it before plain candle ops
/// in an [autocast](crate::autocast()) region.
///
/// f16, bf16 and f32 inputs are cast to the dtype that the region's policy gives `op`, by its class
/// ([`OpClass`](crate::precision::OpClass)). For an op that follows its inputs, it is the widest dtype among them, f64
/// included (tensors without dimensions do not count if others have dimensions). f64 is never narrowed, and integers
/// stay unchanged. Outside of regions nothing is cast.
///
/// A weight (a [`Var`](candle_core::Var), not a view of one) in f32 is cast to the lower dtype once: its copy is kept
/// until the outermost region ends. The copies made under [`no_grad`](crate::no_grad()) are separate, without a graph.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::precision::Autocast;
/// use tallow::{autocast, ops};
///
/// let a = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let b = Tensor::ones((3, 5), DType::F16, &Device::Cpu)?;
/// let c = autocast(Autocast::cpu(DType::F16), || {
///     let [a, b] = ops::cast_for("matmul", [&a, &b])?;
///     Ok(a.matmul(&b)?) // candle's own
/// })?;
/// assert_eq!(c.dtype(), DType::F16);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of a cast, such as no memory for the copy; views of more elements than can be counted or fit the memory.
pub fn cast_for<const N: usize>(op: &'static str, inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let target = precision::decide(op, &inputs.map(Into::into));
    let mut outputs = inputs.map(Tensor::clone);
    for x in &mut outputs {
        *x = operand(op, x)?;
        if let Some(dtype) = target {
            *x = cast_castable(x, dtype)?;
        }
    }
    Ok(outputs)
}

/// Casts `x` to `dtype` if autocast regions cast its dtype.
pub(super) fn cast_castable(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match precision::is_castable(x.dtype()) && x.dtype() != dtype {
        true => cast_or_cached(x, dtype),
        false => Ok(x.clone()),
    }
}

/// Runs [`cast_for`] on the operand that decides the dtype, and casts `tables` (of angles, say), which have no
/// gradient, to the same dtype.
///
/// Outside of a region nothing is cast: the op refuses mixed dtypes.
pub(super) fn cast_with_tables<const N: usize>(
    op: &'static str,
    x: &Tensor,
    tables: [&Tensor; N],
) -> Result<(Tensor, [Tensor; N])> {
    let [x] = cast_for(op, [x])?;
    let mut tables = tables.map(Tensor::clone);
    for table in &mut tables {
        *table = operand(op, table)?;
        if precision::is_enabled() && precision::is_castable(table.dtype()) {
            *table = cast_table(table, x.dtype())?;
        }
    }
    Ok((x, tables))
}

/// Casts a table, which has no gradient, to `dtype`. In a region the copy is cached for all layers that read it, as
/// weights are. Without a graph, which would keep it until backward, it is freed with its op.
pub(super) fn cast_table(table: &Tensor, dtype: DType) -> Result<Tensor> {
    match table.dtype() == dtype {
        true => Ok(table.detach()),
        false if precision::caches_weights() && is_grad_enabled() => {
            cached_or(table, dtype, false, || cast(&table.detach(), dtype))
        }
        false => cast(&table.detach(), dtype),
    }
}

/// The key of a cached cast: the trace, if any; the tensor; the dtype; whether it is in the graph. Tensor ids are never
/// reused.
type Key = (Option<u64>, TensorId, DType, bool);

thread_local! {
    static WEIGHTS: RefCell<HashMap<Key, Tensor>> = RefCell::default();
}

/// Caches what PyTorch's `cached_cast` does: only a leaf's copy in half precision is worth it.
fn cast_or_cached(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let is_weight = x.is_variable() && x.dtype() == DType::F32 && dtype != DType::F64;
    if !(is_weight && precision::caches_weights()) {
        return cast(x, dtype);
    }
    cached(x, dtype, is_grad_enabled())
}

/// Returns a weight's copy that is not in the graph, cached like those of [`cast_for`].
pub(super) fn cached_copy(weight: &Tensor, dtype: DType) -> Result<Tensor> {
    cached(weight, dtype, false)
}

fn cached(x: &Tensor, dtype: DType, in_graph: bool) -> Result<Tensor> {
    cached_or(x, dtype, in_graph, || match in_graph {
        true => cast(x, dtype),
        false => cast_weight(&x.detach(), dtype),
    })
}

/// Returns the cached result of `cast`, which is kept until the outermost region ends.
fn cached_or(
    x: &Tensor,
    dtype: DType,
    in_graph: bool,
    cast: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    // Copies in a trace are meta tensors, and belong to that trace.
    let key = (graph::trace_id(), x.id(), dtype, in_graph);
    if let Some(kept) = WEIGHTS.with_borrow(|weights| weights.get(&key).cloned()) {
        return Ok(kept);
    }
    let copy = cast()?;
    precision::on_outermost_end(clear_cached_casts);
    WEIGHTS.with_borrow_mut(|weights| weights.insert(key, copy.clone()));
    Ok(copy)
}

/// Drops this thread's cached casts, because the region ended or the weights changed.
pub(crate) fn clear_cached_casts() {
    // Taken out first and dropped after, because dropping a graph must not happen during a borrow. A thread that is
    // ending has no cache.
    let kept = WEIGHTS.try_with(|weights| std::mem::take(&mut *weights.borrow_mut()));
    drop(kept);
}
