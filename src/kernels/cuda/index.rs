//! Elements by index, the largest elements of rows, and one-hot rows; see `index.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_float, launch_config, suffix};
use crate::kernels::cpu::index::Sizes;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "index",
    parts: &[PRELUDE, include_str!("index.cu")],
};

/// Computes `y[o, j, i] = x[o, ids[o, j, i], i]`, 0 for an id that is `ignore`: x (outer, n, inner), ids u32 and y
/// (outer, k, inner).
pub(crate) fn gather(
    gpu: &CudaDevice,
    [x, ids]: [View; 2],
    sizes: Sizes,
    ignore: Option<u32>,
    y: View,
) -> Result<()> {
    check_float("gather", y)?;
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "gather", suffix(y.dtype))?;
    let (count, ignore) = (y.len as i64, ignore.map_or(-1, i64::from));
    let [n, k, inner] = [sizes.n, sizes.k, sizes.inner].map(|size| size as i64);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&ids.pointer).arg(&y.pointer);
    launch.arg(&count).arg(&n).arg(&k).arg(&inner).arg(&ignore);
    // SAFETY: the arguments are those of the kernel; buffers of (outer, n, inner) and of (outer, k, inner) elements,
    // and ids under n.
    unsafe { launch.launch(config(y.len, 256)?) }.w()?;
    Ok(())
}

/// Computes y (outer, n, inner) f32: the base f32, or 0, and the sums by index of values (outer, k, inner). ids u32
/// (outer, k, inner); one that is `ignore` adds nothing.
pub(crate) fn scatter_add(
    gpu: &CudaDevice,
    base: Option<View>,
    [values, ids]: [View; 2],
    sizes: Sizes,
    ignore: Option<u32>,
    y: View,
) -> Result<()> {
    check_float("scatter_add", values)?;
    if y.dtype != DType::F32 || base.is_some_and(|base| base.dtype != DType::F32) {
        bail!("scatter_add: expected sums and base in f32, got {y:?}, {base:?}");
    }
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "scatter_add", suffix(values.dtype))?;
    let (count, ignore) = (y.len as i64, ignore.map_or(-1, i64::from));
    let [n, k, inner] = [sizes.n, sizes.k, sizes.inner].map(|size| size as i64);
    let base = base.map_or(0, |base| base.pointer);
    let mut launch = kernel.builder();
    launch
        .arg(&base)
        .arg(&values.pointer)
        .arg(&ids.pointer)
        .arg(&y.pointer);
    launch.arg(&count).arg(&n).arg(&k).arg(&inner).arg(&ignore);
    // SAFETY: the arguments are those of the kernel; buffers of (outer, n, inner) and of (outer, k, inner) elements.
    unsafe { launch.launch(config(y.len, 256)?) }.w()?;
    Ok(())
}

/// Computes the indices (rows, k) u32 of the k largest elements of each row of x (rows, n), the largest first.
pub(crate) fn topk(gpu: &CudaDevice, x: View, [n, k]: [usize; 2], indices: View) -> Result<()> {
    check_float("topk", x)?;
    if indices.len == 0 {
        return Ok(());
    }
    if n > i32::MAX as usize {
        bail!("topk: expected rows of under 2^31 elements, got {n}");
    }
    let kernel = SOURCE.kernel(gpu, "topk", suffix(x.dtype))?;
    let count = indices.len / k;
    let (rows, width, few) = (count as i64, n as i32, k as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&indices.pointer);
    launch.arg(&rows).arg(&width).arg(&few);
    // SAFETY: the arguments are those of the kernel, buffers of (rows, n) and of (rows, k) elements.
    unsafe { launch.launch(config(count, 8)?) }.w()?;
    Ok(())
}

/// Computes y (count, classes): 1 at the id of each row, else 0; ids (count) u32.
pub(crate) fn one_hot(gpu: &CudaDevice, ids: View, classes: usize, y: View) -> Result<()> {
    check_float("one_hot", y)?;
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "one_hot", suffix(y.dtype))?;
    let (count, classes) = (y.len as i64, classes as i64);
    let mut launch = kernel.builder();
    launch.arg(&ids.pointer).arg(&y.pointer);
    launch.arg(&count).arg(&classes);
    // SAFETY: the arguments are those of the kernel, buffers of count / classes and of count elements.
    unsafe { launch.launch(config(y.len, 256)?) }.w()?;
    Ok(())
}

/// Returns the grid for `count` results, of which a block of 256 threads computes `of_block`.
fn config(count: usize, of_block: usize) -> Result<LaunchConfig> {
    let blocks = count.div_ceil(of_block);
    if blocks > i32::MAX as usize {
        bail!("index: expected under 2^31 blocks, got {blocks}");
    }
    Ok(launch_config((blocks, 1), (256, 1)))
}
