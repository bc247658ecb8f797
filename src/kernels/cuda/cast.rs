//! Copies in another dtype; see `cast.cu`.

use super::source::{PRELUDE, Source};
use super::view::copy;
use super::{View, launch_config, suffixes};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "cast",
    parts: &[PRELUDE, include_str!("cast.cu")],
};

/// Elements of a block, as in the source.
const BLOCK: usize = 4096;

/// y = x, rounded to the nearest, ties to even: both (n), each f32, f16 or bf16.
pub(crate) fn cast(card: &CudaDevice, x: View, y: View) -> Result<()> {
    if x.dtype == y.dtype {
        return copy(card, x, y);
    }
    let kernel = SOURCE.kernel(card, "cast", suffixes(x.dtype, y.dtype))?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer).arg(&n);
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(launch_config((y.len.div_ceil(BLOCK), 1), (256, 1))) }.w()?;
    Ok(())
}
