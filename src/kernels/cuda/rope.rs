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

/// Adjacent heads in the rows of positions: (B, T, H*Dh), or a slice of wider rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedHeads {
    /// B: the batch size.
    pub batch: usize,
    /// T: the number of positions.
    pub length: usize,
    /// H: the number of heads. It counts q and k if both are rotated and k follows q in packed rows.
    pub heads: usize,
    /// Dh: the head dimension, even.
    pub head_dim: usize,
    /// The distance of positions, in elements: H*Dh, or more if q, k and v are packed.
    pub row: usize,
}

/// The kind of rotation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    /// Whether element i is paired with element i + Dh / 2 instead of its neighbour.
    pub by_halves: bool,
    /// Whether the rotation is inverted, as for gradients.
    pub inverse: bool,
}

/// Rotates x (outer, length, width) by the angles of the tables, cos and sin (length, width / 2) in f32.
pub(crate) fn rotate(
    gpu: &CudaDevice,
    x: View,
    tables: [View; 2],
    (length, width): (usize, usize),
    rotation: Rotation,
    y: View,
) -> Result<()> {
    if y.len == 0 {
        return Ok(());
    }
    let heads = PackedHeads {
        batch: x.len / (length * width),
        length,
        heads: 1,
        head_dim: width,
        row: width,
    };
    launch(gpu, x, tables, &heads, rotation, y)
}

/// Rotates the heads that begin at x in place. `tables` are cos and sin (T, Dh / 2) in f32.
pub(crate) fn in_place(
    gpu: &CudaDevice,
    x: View,
    tables: [View; 2],
    heads: &PackedHeads,
    rotation: Rotation,
) -> Result<()> {
    launch(gpu, x, tables, heads, rotation, x)
}

fn launch(
    gpu: &CudaDevice,
    x: View,
    [cos, sin]: [View; 2],
    heads: &PackedHeads,
    rotation: Rotation,
    y: View,
) -> Result<()> {
    let (name, parts) = match rotation.by_halves {
        false => ("rope", 1),
        true => ("rope_halves", 2),
    };
    let kernel = SOURCE.kernel(gpu, name, suffix(x.dtype))?;
    let lanes = (heads.head_dim / parts).div_ceil(in_vector(x.dtype));
    let places = (heads.length * lanes).div_ceil(256);
    let blocks = places * (heads.batch * heads.heads).div_ceil(4);
    let (positions, sign) = (0u64, if rotation.inverse { -1f32 } else { 1.0 });
    let stride = heads.row as i64;
    let [batch, length, heads, width] =
        [heads.batch, heads.length, heads.heads, heads.head_dim].map(|size| size as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer);
    launch.arg(&cos.pointer).arg(&sin.pointer);
    launch.arg(&positions).arg(&sign);
    launch.arg(&batch).arg(&length).arg(&heads).arg(&width);
    launch.arg(&stride).arg(&stride);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((blocks, 1), (256, 1))) }.w()?;
    Ok(())
}
