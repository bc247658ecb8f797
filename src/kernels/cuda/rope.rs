//! Rotary position embedding; see `rope.cu`.

use super::source::{PRELUDE, Source};
use super::{View, in_vector, launch_config, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "rope",
    parts: &[PRELUDE, include_str!("rope.cu")],
};

/// Whether the grid reaches all of x (..., length, width).
pub(crate) fn takes(dims: &[usize]) -> bool {
    let [outer @ .., _length, _width] = dims else {
        return false;
    };
    outer.iter().product::<usize>().div_ceil(4) <= 65_535
}

/// Rotates x (outer, length, width) by the tables' angles, cos and sin (length, width / 2) in f32, or `back`.
pub(crate) fn rotate(
    card: &CudaDevice,
    x: View,
    [cos, sin]: [View; 2],
    (length, width): (usize, usize),
    back: bool,
    y: View,
) -> Result<()> {
    let kernel = SOURCE.kernel(card, &format!("rope_{}", suffix(x.dtype)))?;
    let outer = x.len / (length * width);
    let lanes = width.div_ceil(in_vector(x.dtype));
    let config = launch_config(
        ((length * lanes).div_ceil(256), outer.div_ceil(4)),
        (256, 1),
    );
    let (positions, sign) = (0u64, if back { -1f32 } else { 1.0 });
    let [outer, length, heads, width] = [outer, length, 1, width].map(|size| size as i32);
    let stride = i64::from(width);
    let mut launch = kernel.builder();
    launch
        .arg(&x.pointer)
        .arg(&y.pointer)
        .arg(&cos.pointer)
        .arg(&sin.pointer);
    launch.arg(&positions).arg(&sign);
    launch.arg(&outer).arg(&length).arg(&heads).arg(&width);
    launch.arg(&stride).arg(&stride);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
