//! The choice between an op's kernel and its reference, and the record of fallbacks.

use super::info::OpInfo;
use super::operand::{check_float, check_size, is_half, is_supported_float, is_supported_integer};
use crate::grad::with_value;
use crate::graph::{self, Target};
use crate::hardware::device_name;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The policy for ops with and without a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelPolicy {
    /// Runs the kernel if there is one, else the reference, which is recorded in [`fallbacks`].
    #[default]
    Prefer,
    /// Runs the kernel, or fails with [`Error::NoKernel`].
    Strict,
    /// Always runs the reference, as a device without kernels does.
    Reference,
}

/// An op that ran its reference because there was no kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Fallback {
    /// The op's name.
    pub op: &'static str,
    /// The dtype of its first operand.
    pub dtype: String,
    /// The device of its first operand.
    pub device: String,
}

thread_local! {
    static POLICY: Cell<KernelPolicy> = const { Cell::new(KernelPolicy::Prefer) };
}

static FALLBACKS: Mutex<BTreeSet<Fallback>> = Mutex::new(BTreeSet::new());

/// Runs `f` under `policy` on this thread, then restores the previous policy, also after a panic.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, KernelPolicy};
///
/// let x = Tensor::new(&[[0.5f32, 1.0, -2.0]], &Device::Cpu)?;
/// let kernel = ops::with_kernel_policy(KernelPolicy::Strict, || ops::log_softmax(&x))?;
/// let reference = ops::with_kernel_policy(KernelPolicy::Reference, || ops::log_softmax(&x))?;
/// assert!((kernel - reference)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn with_kernel_policy<R>(policy: KernelPolicy, f: impl FnOnce() -> R) -> R {
    with_value(|policy| POLICY.replace(policy), policy, f)
}

pub(crate) fn current_kernel_policy() -> KernelPolicy {
    POLICY.get()
}

/// Returns every op, dtype and device whose reference ran because there is no kernel, since the process began; sorted.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[0.5f32, 1.0], &Device::Cpu)?;
/// ops::exp(&x)?;
/// assert!(ops::fallbacks().is_empty()); // the CPU has a kernel for it
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn fallbacks() -> Vec<Fallback> {
    let seen = FALLBACKS.lock().unwrap_or_else(|e| e.into_inner());
    seen.iter().cloned().collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Kernel,
    Reference,
}

/// Decides for `op` on a tensor like `x`. On the CPU, kernels support f32, f64, f16 and bf16; on CUDA, ops that have a
/// kernel support f32, f16 and bf16.
pub(crate) fn choose(op: &OpInfo, x: &Tensor) -> Result<Path> {
    choose_where(op.op, x, has_kernel(op, x))
}

/// Returns whether `op` has a kernel for a tensor like `x`, on its device or on the target of the trace.
pub(super) fn has_kernel(op: &OpInfo, x: &Tensor) -> bool {
    has_kernel_for(op, x, x.dtype())
}

/// Returns whether `op` has a kernel that computes in `dtype` on the device of `x` or on the target of the trace.
pub(super) fn has_kernel_for(op: &OpInfo, x: &Tensor, dtype: DType) -> bool {
    match (graph::target(), x.device()) {
        (Some(Target::Cuda), _) => has_cuda_kernel(op, x, dtype),
        (Some(Target::Cpu), _) | (None, Device::Cpu) => {
            is_supported_float(dtype) || is_supported_integer(dtype)
        }
        #[cfg(feature = "cuda")]
        (None, Device::Cuda(gpu)) => {
            has_cuda_kernel(op, x, dtype) && crate::kernels::cuda::source::is_supported(gpu)
        }
        _ => false,
    }
}

/// Returns whether `op` has a kernel for NVIDIA GPUs that supports a tensor like `x` and computes in `dtype`.
pub(super) fn has_cuda_kernel(op: &OpInfo, x: &Tensor, dtype: DType) -> bool {
    let width = x.dims().last().copied().unwrap_or(0);
    let is_stored =
        is_supported_integer(dtype) || matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    is_stored && x.elem_count() > 0 && op.gpu_width.is_some_and(|widest| width <= widest)
}

/// Decides like [`choose`], for an op that determines itself whether it has a kernel for `x`.
pub(crate) fn choose_where(op: &'static str, x: &Tensor, has_kernel: bool) -> Result<Path> {
    check_float(op, x)?; // before the path is chosen: candle's ops would compute with integers
    choose_of_any(op, x, has_kernel)
}

/// Decides like [`choose_where`], for an op that takes integers too.
pub(super) fn choose_of_any(op: &'static str, x: &Tensor, has_kernel: bool) -> Result<Path> {
    match (POLICY.get(), has_kernel) {
        (KernelPolicy::Reference, _) => Ok(Path::Reference),
        (_, true) => Ok(Path::Kernel),
        (policy, false) => {
            let dtype = x.dtype().as_str().to_string();
            let device = device_name(x.device());
            if policy == KernelPolicy::Strict {
                return Err(Error::NoKernel { op, dtype, device });
            }
            if graph::target().is_none() {
                // A trace runs nothing.
                let mut seen = FALLBACKS.lock().unwrap_or_else(|e| e.into_inner());
                seen.insert(Fallback { op, dtype, device });
            }
            Ok(Path::Reference)
        }
    }
}

/// Refuses operands that differ from the first in dtype or device.
pub(crate) fn check_same(op: &'static str, operands: &[(&str, &Tensor)]) -> Result<()> {
    check_operands(op, operands, false)
}

/// Checks like [`check_same`], but if the first operand is in half precision, others may be in f32, the compute dtype:
/// weights that autocast does not cast, and tables.
pub(crate) fn check_same_or_f32(op: &'static str, operands: &[(&str, &Tensor)]) -> Result<()> {
    check_operands(op, operands, true)
}

fn check_operands(
    op: &'static str,
    operands: &[(&str, &Tensor)],
    allows_f32_with_half: bool,
) -> Result<()> {
    let [(first_name, first), rest @ ..] = operands else {
        return Ok(());
    };
    check_float(op, first)?;
    let f32_too = allows_f32_with_half && is_half(first.dtype());
    for (_, tensor) in operands {
        check_size(op, tensor.dims(), tensor.dtype(), tensor.device())?;
    }
    for (name, tensor) in rest {
        if tensor.dtype() != first.dtype() && !(f32_too && tensor.dtype() == DType::F32) {
            return Err(Error::DType {
                op,
                expected: format!(
                    "one dtype, {} as {first_name} has it{}",
                    first.dtype().as_str(),
                    if f32_too { ", or f32" } else { "" }
                ),
                got: format!("{name} in {}", tensor.dtype().as_str()),
                hint: "convert one with to_dtype".into(),
            });
        }
        check_one_device(op, (first_name, first), (name, tensor))?;
    }
    Ok(())
}

/// Refuses a tensor on another device than the first.
pub(super) fn check_one_device(
    op: &'static str,
    (first_name, first): (&str, &Tensor),
    (name, tensor): (&str, &Tensor),
) -> Result<()> {
    if graph::are_on_one_device(tensor, first) {
        return Ok(());
    }
    Err(Error::placement(op, device_name(tensor.device())).must_be(
        format!(
            "{name} on {}, where {first_name} is",
            device_name(first.device())
        ),
        "move one with to_device",
    ))
}
