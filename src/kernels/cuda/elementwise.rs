//! Elementwise maps of one or two buffers; see `elementwise.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_alike, flat_config, in_vector, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "elementwise",
    parts: &[PRELUDE, include_str!("elementwise.cu")],
};

/// Computes `y = f(a, b)`, where `f` names a map of the source, a is the first of `reads` and b the last. `numbers`
/// are those of maps that have one or two. All (n), in f32, f16 or bf16. y may be the buffer of a or b.
///
/// # Errors
/// Other lengths or dtypes; driver errors.
pub(crate) fn map(
    gpu: &CudaDevice,
    f: &'static str,
    numbers: [f64; 2],
    reads: &[View],
    y: View,
) -> Result<()> {
    reads.iter().try_for_each(|x| check_alike(f, *x, y))?;
    let (Some(a), Some(b)) = (reads.first(), reads.last()) else {
        candle_core::bail!("{f}: expected one or two inputs, got none");
    };
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, f, suffix(y.dtype))?;
    let (n, [p, q]) = (y.len as i64, numbers.map(|number| number as f32));
    let mut launch = kernel.builder();
    launch.arg(&a.pointer).arg(&b.pointer).arg(&y.pointer);
    launch.arg(&n).arg(&p).arg(&q);
    let config = flat_config(y.len.div_ceil(in_vector(y.dtype)));
    // SAFETY: the arguments are those of the kernel, buffers of n elements each.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
