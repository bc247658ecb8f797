//! The SwiGLU gate; see `swiglu.cu`.

use super::source::{PRELUDE, Source};
use super::{View, in_vector, launch_config, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "swiglu",
    parts: &[PRELUDE, include_str!("swiglu.cu")],
};

fn config(n: usize, per_thread: usize) -> candle_core::cuda_backend::cudarc::driver::LaunchConfig {
    launch_config((n.div_ceil(256 * per_thread), 1), (256, 1))
}

/// `y = silu(gate) up`, all (n).
pub(crate) fn forward(card: &CudaDevice, gate: View, up: View, y: View) -> Result<()> {
    let name = format!("swiglu_forward_{}", suffix(y.dtype));
    let kernel = SOURCE.kernel(card, &name)?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch
        .arg(&gate.pointer)
        .arg(&up.pointer)
        .arg(&y.pointer)
        .arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(config(y.len, 2 * in_vector(y.dtype))) }.w()?;
    Ok(())
}

/// The gradients of gate and up, all (n).
pub(crate) fn backward(
    card: &CudaDevice,
    [dy, gate, up]: [View; 3],
    [dgate, dup]: [View; 2],
) -> Result<()> {
    let name = format!("swiglu_backward_{}", suffix(dy.dtype));
    let kernel = SOURCE.kernel(card, &name)?;
    let (no_y, n) = (0u64, dy.len as i64);
    let mut launch = kernel.builder();
    for view in [&dy, &gate, &up, &dgate, &dup] {
        launch.arg(&view.pointer);
    }
    launch.arg(&no_y).arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(config(dy.len, 2 * in_vector(dy.dtype))) }.w()?;
    Ok(())
}
