//! Sums, element by element; see `arithmetic.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffixes};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "arithmetic",
    parts: &[PRELUDE, include_str!("arithmetic.cu")],
};

/// Elements of a block, as in the source.
const BLOCK: usize = 4096;

/// `y = a + b` in f32, rounded once: a and y (n), and b shorter by a whole factor, from its begin again after its end.
/// All in one dtype; or a and b in two, of which one is f32, as y is. y may be the buffer of a, or of a b of its
/// length, in its dtype.
///
/// # Errors
/// Other lengths or dtypes, and the driver's.
pub(crate) fn add(gpu: &CudaDevice, a: View, b: View, y: View) -> Result<()> {
    let sum = match (a.dtype, b.dtype) {
        (DType::F16, DType::F16) => Some(DType::F16),
        (DType::BF16, DType::BF16) => Some(DType::BF16),
        (DType::F32, DType::F32 | DType::F16 | DType::BF16) => Some(DType::F32),
        (DType::F16 | DType::BF16, DType::F32) => Some(DType::F32),
        _ => None,
    };
    if sum != Some(y.dtype) {
        bail!(
            "no CUDA kernel for {:?} + {:?} to {:?}",
            a.dtype,
            b.dtype,
            y.dtype
        );
    }
    if y.len != a.len || !y.len.is_multiple_of(b.len) {
        bail!(
            "{} elements + {} to {}: b is not repeated a whole number of times",
            a.len,
            b.len,
            y.len
        );
    }
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "add", suffixes(a.dtype, b.dtype))?;
    let (n, period) = (y.len as i64, b.len as i64);
    let mut launch = kernel.builder();
    launch.arg(&a.pointer).arg(&b.pointer).arg(&y.pointer);
    launch.arg(&n).arg(&period);
    // SAFETY: the arguments are those of the kernel: n elements, as many and a whole fraction of as many.
    unsafe { launch.launch(launch_config((y.len.div_ceil(BLOCK), 1), (256, 1))) }.w()?;
    Ok(())
}
