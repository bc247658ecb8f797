//! Comparisons, and selection by their results; see `select.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_alike, launch_config, suffix};
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "select",
    parts: &[PRELUDE, include_str!("select.cu")],
};

/// Computes y (n) u8: 1 where the comparison `name` of the source holds for a and b (n), else 0. Both in f32, f16,
/// bf16, u8, u32 or i64.
pub(crate) fn compare(
    gpu: &CudaDevice,
    name: &'static str,
    [a, b]: [View; 2],
    y: View,
) -> Result<()> {
    let types = match a.dtype {
        DType::U8 => "u8",
        DType::U32 => "u32",
        DType::I64 => "i64",
        DType::F64 => bail!("{name}: no CUDA kernel for f64"),
        float => suffix(float),
    };
    if (a.dtype, a.len, y.dtype, y.len) != (b.dtype, b.len, DType::U8, a.len) {
        bail!(
            "{name}: expected two buffers of one dtype and length, and u8, got {a:?}, {b:?}, {y:?}"
        );
    }
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, name, types)?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch.arg(&a.pointer).arg(&b.pointer).arg(&y.pointer);
    launch.arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(config(y.len)) }.w()?;
    Ok(())
}

/// Computes y (n): a where the condition (n) u8 is not 0, else b; `other` stands for one that is missing.
pub(crate) fn select(
    gpu: &CudaDevice,
    condition: View,
    [a, b]: [Option<View>; 2],
    other: f64,
    y: View,
) -> Result<()> {
    [a, b]
        .iter()
        .flatten()
        .try_for_each(|x| check_alike("where_cond", *x, y))?;
    if condition.len != y.len || condition.dtype != DType::U8 {
        bail!(
            "where_cond: expected a condition of {} elements in u8, got {condition:?}",
            y.len
        );
    }
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "select", suffix(y.dtype))?;
    let [a, b] = [a, b].map(|x| x.map_or(0, |x| x.pointer));
    let (n, other) = (y.len as i64, other as f32);
    let mut launch = kernel.builder();
    launch
        .arg(&condition.pointer)
        .arg(&a)
        .arg(&b)
        .arg(&y.pointer);
    launch.arg(&n).arg(&other);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each, or null.
    unsafe { launch.launch(config(y.len)) }.w()?;
    Ok(())
}

fn config(n: usize) -> LaunchConfig {
    launch_config((n.div_ceil(1024), 1), (256, 1))
}
