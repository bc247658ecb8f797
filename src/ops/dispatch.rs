//! Kernel or reference: the decision, and the list of what fell back.

use super::info::OpInfo;
use super::operand::{check_float, check_size, is_half, is_supported_float};
use crate::grad::holding;
use crate::graph::{self, Target};
use crate::hardware::device_name;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// What an op does where it has a kernel, and where it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelPolicy {
    /// The kernel where there is one, else the reference, noted in [`fallbacks`].
    #[default]
    Prefer,
    /// The kernel, or [`Error::NoKernel`].
    Strict,
    /// The reference everywhere: what a device without kernels runs, on any device.
    Reference,
}

/// An op that ran its reference because there was no kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Fallback {
    /// The op.
    pub op: &'static str,
    /// The dtype it was asked for.
    pub dtype: String,
    /// The device it was asked for.
    pub device: String,
}

thread_local! {
    static POLICY: Cell<KernelPolicy> = const { Cell::new(KernelPolicy::Prefer) };
}

static FALLBACKS: Mutex<BTreeSet<Fallback>> = Mutex::new(BTreeSet::new());

/// Runs `f` under `policy` on this thread, and restores the former policy, on panic too.
pub fn with_kernel_policy<R>(policy: KernelPolicy, f: impl FnOnce() -> R) -> R {
    holding(|policy| POLICY.replace(policy), policy, f)
}

/// The policy that holds on this thread.
pub(crate) fn current_kernel_policy() -> KernelPolicy {
    POLICY.get()
}

/// Every op, dtype and device that has run its reference for want of a kernel since the process began, sorted.
pub fn fallbacks() -> Vec<Fallback> {
    let seen = FALLBACKS.lock().unwrap_or_else(|e| e.into_inner());
    seen.iter().cloned().collect()
}

/// What [`choose`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Kernel,
    Reference,
}

/// Decides for `op` on a tensor like `x`. The ops' kernels are for f32, f64, f16 and bf16 on the CPU; on CUDA, some
/// have one for f32, f16 and bf16.
pub(crate) fn choose(op: &OpInfo, x: &Tensor) -> Result<Path> {
    choose_where(op.op, x, has_kernel(op, x))
}

/// Whether `op` has a kernel for a tensor like `x`, where it is or where it is traced for.
pub(super) fn has_kernel(op: &OpInfo, x: &Tensor) -> bool {
    match (graph::target(), x.device()) {
        (Some(Target::Cuda), _) => has_cuda_kernel(op, x),
        (Some(Target::Cpu), _) | (None, Device::Cpu) => is_supported_float(x.dtype()),
        #[cfg(feature = "cuda")]
        (None, Device::Cuda(gpu)) => {
            has_cuda_kernel(op, x) && crate::kernels::cuda::source::runs_on(gpu)
        }
        _ => false,
    }
}

/// Whether `op` has a kernel for NVIDIA GPUs that takes a tensor like `x`.
pub(super) fn has_cuda_kernel(op: &OpInfo, x: &Tensor) -> bool {
    let width = x.dims().last().copied().unwrap_or(0);
    let stored = matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16);
    stored && x.elem_count() > 0 && op.gpu_width.is_some_and(|widest| width <= widest)
}

/// As [`choose`], for an op that knows itself whether it has a kernel for `x`.
pub(crate) fn choose_where(op: &'static str, x: &Tensor, has_kernel: bool) -> Result<Path> {
    check_float(op, x)?; // before the path is chosen: candle's ops would compute with integers
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

/// As [`check_same`], but operands beside a first in half precision may be in f32, which is what is computed in:
/// weights that autocast leaves alone, tables.
pub(super) fn check_same_or_f32(op: &'static str, operands: &[(&str, &Tensor)]) -> Result<()> {
    check_operands(op, operands, true)
}

fn check_operands(
    op: &'static str,
    operands: &[(&str, &Tensor)],
    f32_beside_half: bool,
) -> Result<()> {
    let [(first_name, first), rest @ ..] = operands else {
        return Ok(());
    };
    check_float(op, first)?;
    let f32_too = f32_beside_half && is_half(first.dtype());
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
        if !graph::are_on_one_device(tensor, first) {
            return Err(Error::placement(op, device_name(tensor.device())).must_be(
                format!(
                    "{name} on {}, where {first_name} is",
                    device_name(first.device())
                ),
                "move one with to_device",
            ));
        }
    }
    Ok(())
}
