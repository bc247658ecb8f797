//! Gated activations; see `gated.cu`.

use super::source::{PRELUDE, Source};
use super::{View, flat_config, in_vector, suffix};
use crate::kernels::Gate;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "gated",
    parts: &[PRELUDE, include_str!("gated.cu")],
};

/// Returns the names of a gate's kernels: forward, backward, and both for packed rows.
fn stems(f: Gate) -> [&'static str; 4] {
    match f {
        Gate::Silu => [
            "swiglu_forward",
            "swiglu_backward",
            "swiglu_packed_forward",
            "swiglu_packed_backward",
        ],
        Gate::Gelu => [
            "geglu_forward",
            "geglu_backward",
            "geglu_packed_forward",
            "geglu_packed_backward",
        ],
        Gate::GeluTanh => [
            "geglu_tanh_forward",
            "geglu_tanh_backward",
            "geglu_tanh_packed_forward",
            "geglu_tanh_packed_backward",
        ],
    }
}

/// Computes `y = f(gate) up`, all (n). y may be the buffer of gate or up.
pub(crate) fn forward(gpu: &CudaDevice, f: Gate, gate: View, up: View, y: View) -> Result<()> {
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, stems(f)[0], suffix(y.dtype))?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch.arg(&gate.pointer).arg(&up.pointer).arg(&y.pointer);
    launch.arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(flat_config(y.len.div_ceil(in_vector(y.dtype)))) }.w()?;
    Ok(())
}

/// Computes the gradients of gate and up, all (n).
pub(crate) fn backward(
    gpu: &CudaDevice,
    f: Gate,
    [dy, gate, up]: [View; 3],
    [dgate, dup]: [View; 2],
) -> Result<()> {
    launch_backward(gpu, f, [dy, gate, up, dgate, dup], None)
}

/// Overwrites gate, up and dy, all (n), with dgate, dup and `y = f(gate) up`.
pub(crate) fn backward_in_place(
    gpu: &CudaDevice,
    f: Gate,
    gate: View,
    up: View,
    dy: View,
) -> Result<()> {
    launch_backward(gpu, f, [dy, gate, up, gate, up], Some(dy))
}

/// Launches backward. `buffers` are dy, gate, up, dgate and dup.
fn launch_backward(gpu: &CudaDevice, f: Gate, buffers: [View; 5], y: Option<View>) -> Result<()> {
    let [dy, ..] = buffers;
    if dy.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, stems(f)[1], suffix(dy.dtype))?;
    let (y, n) = (y.map_or(0, |y| y.pointer), dy.len as i64);
    let mut launch = kernel.builder();
    for buffer in &buffers {
        launch.arg(&buffer.pointer);
    }
    launch.arg(&y).arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(flat_config(dy.len.div_ceil(in_vector(dy.dtype)))) }.w()?;
    Ok(())
}

/// Computes `y = f(gate) up` for packed rows: gate_up (N, 2F), y (N, F), F being `width`.
pub(crate) fn packed_forward(
    gpu: &CudaDevice,
    f: Gate,
    gate_up: View,
    y: View,
    width: usize,
) -> Result<()> {
    launch_packed(gpu, stems(f)[2], [gate_up, y], width)
}

/// Overwrites gate_up (N, 2F) with its gradient and dy (N, F) with `y = f(gate) up`; F is `width`.
pub(crate) fn packed_backward_in_place(
    gpu: &CudaDevice,
    f: Gate,
    gate_up: View,
    dy: View,
    width: usize,
) -> Result<()> {
    launch_packed(gpu, stems(f)[3], [gate_up, dy], width)
}

fn launch_packed(
    gpu: &CudaDevice,
    stem: &'static str,
    [gate_up, y]: [View; 2],
    width: usize,
) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, stem, suffix(y.dtype))?;
    let rows = y.len / width;
    let packs = rows * width.div_ceil(in_vector(y.dtype));
    let (rows, width) = (rows as i64, width as i32);
    let mut launch = kernel.builder();
    launch.arg(&gate_up.pointer).arg(&y.pointer);
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, buffers of 2 rows * width and of rows * width elements.
    unsafe { launch.launch(flat_config(packs)) }.w()?;
    Ok(())
}
