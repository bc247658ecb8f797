//! Elementwise sums; see `arithmetic.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffixes};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "arithmetic",
    parts: &[PRELUDE, include_str!("arithmetic.cu")],
};

/// Elements per block, as in the source.
const BLOCK: usize = 4096;

/// Computes `y = a + b` in f32, rounded once. a and y (n); b is repeated, so its length divides n. All have one dtype;
/// or a and b have two, one of which is f32, and y is f32. y may be the buffer of a, or of b if it has y's length, in
/// y's dtype.
///
/// # Errors
/// Other lengths or dtypes; driver errors.
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
            "add: no CUDA kernel for {:?} + {:?} to {:?}",
            a.dtype,
            b.dtype,
            y.dtype
        );
    }
    if y.len != a.len || !y.len.is_multiple_of(b.len) {
        bail!(
            "add: expected an output of {0} elements and a length of b that divides {0}, got {1} and {2}",
            a.len,
            y.len,
            b.len
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
    // SAFETY: the arguments are those of the kernel: n elements of a and y, and b has a divisor of n elements.
    unsafe { launch.launch(launch_config((y.len.div_ceil(BLOCK), 1), (256, 1))) }.w()?;
    Ok(())
}
