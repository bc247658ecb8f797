//! Casts between dtypes; see `cast.cu`.

use super::source::{PRELUDE, Source};
use super::view::copy;
use super::{View, check_float, launch_config, suffix, suffixes};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "cast",
    parts: &[PRELUDE, include_str!("cast.cu")],
};

/// Elements per block, as in the source.
const BLOCK: usize = 4096;

/// Computes y = x rounded to nearest even. Both (n), f32, f16 or bf16; x may also be u8, u32 or i64.
pub(crate) fn cast(gpu: &CudaDevice, x: View, y: View) -> Result<()> {
    if x.dtype == y.dtype {
        return copy(gpu, x, y);
    }
    if y.len == 0 {
        return Ok(());
    }
    check_float("cast", y)?;
    let (stem, types) = match x.dtype {
        DType::U8 => ("cast_u8", suffix(y.dtype)),
        DType::U32 => ("cast_u32", suffix(y.dtype)),
        DType::I64 => ("cast_i64", suffix(y.dtype)),
        _ => ("cast", suffixes(x.dtype, y.dtype)),
    };
    let kernel = SOURCE.kernel(gpu, stem, types)?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer).arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(launch_config((y.len.div_ceil(BLOCK), 1), (256, 1))) }.w()?;
    Ok(())
}
