//! TF32: f32 matmuls on the tensor cores of NVIDIA GPUs, off by default.

use super::{cuda, device_name};
use crate::{Error, Result};
use candle_core::Device;
use candle_core::cuda::{gemm_reduced_precision_f32, set_gemm_reduced_precision_f32};

/// Returns whether f32 matmuls on `device` are computed in TF32; see [`set_tf32`]. False on devices without TF32.
///
/// [`set_tf32`] has an example.
pub fn tf32(device: &Device) -> bool {
    gemm_reduced_precision_f32() && cuda::has_tf32(device)
}

/// Switches TF32 on or off for f32 matmuls on NVIDIA GPUs. It is off by default, and matmuls then have the accuracy of
/// f32.
///
/// TF32 has the range of f32 and 10 of its 23 mantissa bits. Both operands of a matmul are rounded to it, with an error
/// of at most 2^-11 each; tensor cores multiply, and sum in f32. Results, and everything that is not a matmul, stay
/// f32. Sums have a relative error of about 3e-4, in place of less than 1e-6 in f32, for several times the speed.
///
/// This is candle's own switch (`candle_core::cuda::set_gemm_reduced_precision_f32`): one for the process and all of
/// its GPUs, whichever of the two functions sets it. It is read
/// - by candle's f32 matmuls and by this crate's eager ops on a GPU, at each matmul, in backward too;
/// - by [`attention::flash`](crate::attention::flash()) at each call in f32; backward uses the setting of its forward;
/// - by [`compile`](crate::compile) when a step, a forward or attention is planned: its matmuls and its attention keep
///   that setting.
///
/// Half precision, f64 and the CPU are not affected. PyTorch's equivalent is
/// `torch.set_float32_matmul_precision("high")`. The format is described in NVIDIA's "A100 Tensor Core GPU
/// Architecture", 2020.
///
/// ```
/// let device = tallow::device("cpu")?;
/// assert!(!tallow::hardware::tf32(&device));
/// assert!(tallow::hardware::set_tf32(&device, true).is_err()); // f32 is exact there
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Device`] for `true` on a device without TF32: one that is not an NVIDIA GPU, or has a compute capability
/// below 8.0. `false` always succeeds; on such a device it does not change the switch.
pub fn set_tf32(device: &Device, on: bool) -> Result<()> {
    match (cuda::has_tf32(device), on) {
        (false, true) => Err(Error::Device {
            name: device_name(device),
            problem: "it has no TF32, its products of f32 are exact".into(),
            hint: "leave TF32 off, or use an NVIDIA gpu of compute capability 8.0 or later, as \
                   cuda:0"
                .into(),
        }),
        (false, false) => Ok(()),
        (true, _) => {
            set_gemm_reduced_precision_f32(on);
            Ok(())
        }
    }
}
