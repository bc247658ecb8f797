//! TF32: products of f32 on the tensor cores of NVIDIA GPUs, where that is wanted.

use super::{cuda, device_name};
use crate::{Error, Result};
use candle_core::Device;
use candle_core::cuda::{gemm_reduced_precision_f32, set_gemm_reduced_precision_f32};

/// Whether products of f32 on `device` are computed in TF32; see [`set_tf32`]. `false` wherever there is none.
pub fn tf32(device: &Device) -> bool {
    gemm_reduced_precision_f32() && cuda::has_tf32(device)
}

/// Switches TF32 on or off for products of f32 on NVIDIA GPUs. Off, as it is to begin with, products
/// have f32's accuracy.
///
/// TF32 has f32's range and 10 of its 23 bits of mantissa. Both factors of a product are rounded to it, which is an
/// error of at most 2^-11 each; tensor cores multiply, and add up in f32. Results, and all that is no product, stay
/// f32. Over sums that is a relative error of about 3e-4 where f32 has under 1e-6, for several times the speed.
///
/// This is candle's own switch (`candle_core::cuda::set_gemm_reduced_precision_f32`), one for the process and all of
/// its GPUs, whichever of the two it was set by. What it says is read
/// - by candle's products of f32 and by this crate's eager ops on a GPU, at each product, those of backward too;
/// - by [`attention::flash`](crate::attention::flash()) at each call in f32, whose backward computes as its forward
///   did;
/// - by [`compile`](crate::compile) when a step, a forward or attention is planned: its products and its attention stay
///   what they are then.
///
/// Half precision, f64 and the CPU never follow it. PyTorch has the same choice in
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
/// `true` for a device that has no TF32: one that is no NVIDIA GPU, or is below compute capability 8.0. `false` is what
/// such a device does anyway, and leaves the switch alone.
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
