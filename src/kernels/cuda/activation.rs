//! Elementwise activations and their gradients; see `activation.cu`.

use super::source::{PRELUDE, Source};
use super::{View, flat_config, in_vector, suffix};
use crate::kernels::Activation;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "activation",
    parts: &[PRELUDE, include_str!("activation.cu")],
};

/// Computes `y = f(x)`, both (n). y may be the buffer of x.
pub(crate) fn forward(gpu: &CudaDevice, f: Activation, x: View, y: View) -> Result<()> {
    let stem = match f {
        Activation::Tanh => "tanh_forward",
        Activation::Sigmoid => "sigmoid_forward",
        Activation::LogSigmoid => "log_sigmoid_forward",
        Activation::Silu => "silu_forward",
        Activation::Gelu => "gelu_forward",
        Activation::GeluTanh => "gelu_tanh_forward",
    };
    launch(gpu, stem, &[x, y], None)
}

/// Computes `dx = dy f'(x)`, all (n). dx may be the buffer of dy or x.
pub(crate) fn backward(
    gpu: &CudaDevice,
    f: Activation,
    [dy, x]: [View; 2],
    dx: View,
) -> Result<()> {
    let stem = match f {
        Activation::Tanh => "tanh_backward",
        Activation::Sigmoid => "sigmoid_backward",
        Activation::LogSigmoid => "log_sigmoid_backward",
        Activation::Silu => "silu_backward",
        Activation::Gelu => "gelu_backward",
        Activation::GeluTanh => "gelu_tanh_backward",
    };
    launch(gpu, stem, &[dy, x, dx], None)
}

/// Computes `y = cap tanh(scale x / cap)`, both (n). `scale_cap` is scale and cap.
pub(crate) fn soft_cap(gpu: &CudaDevice, scale_cap: [f64; 2], x: View, y: View) -> Result<()> {
    launch(gpu, "soft_cap_forward", &[x, y], Some(scale_cap))
}

/// Computes `dx = dy scale (1 - tanh(scale x / cap)^2)`, all (n).
pub(crate) fn soft_cap_backward(
    gpu: &CudaDevice,
    scale_cap: [f64; 2],
    [dy, x]: [View; 2],
    dx: View,
) -> Result<()> {
    launch(gpu, "soft_cap_backward", &[dy, x, dx], Some(scale_cap))
}

fn launch(
    gpu: &CudaDevice,
    stem: &'static str,
    buffers: &[View],
    scale_cap: Option<[f64; 2]>,
) -> Result<()> {
    let (len, dtype) = (buffers[0].len, buffers[0].dtype);
    if len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, stem, suffix(dtype))?;
    let (n, scale_cap) = (len as i64, scale_cap.map(|pair| pair.map(|x| x as f32)));
    let mut launch = kernel.builder();
    for buffer in buffers {
        launch.arg(&buffer.pointer);
    }
    launch.arg(&n);
    if let Some([scale, cap]) = &scale_cap {
        launch.arg(scale).arg(cap);
    }
    let config = flat_config(len.div_ceil(in_vector(dtype)));
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
