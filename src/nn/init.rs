//! Initial values drawn from a seed.

use crate::kernels::cpu::{self, Stored, parallel::filled};
#[cfg(feature = "cuda")]
use crate::kernels::cuda;
use crate::kernels::normal::stream;
#[cfg(feature = "cuda")]
use crate::ops::cuda as on_gpu;
use crate::{hardware, ops};
use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use half::{bf16, f16};
use std::collections::TryReserveError;

/// Returns a builder of variables whose initial values are drawn from `seed`.
///
/// The same seed and name give the same bits, in any order of calls, with any number of threads and on any device. (An
/// NVIDIA GPU draws the values itself.) The builder creates a new variable each time that a weight is requested, also
/// for a name that was used before. [`freeze`](super::freeze()) freezes weights by
/// name.
///
/// Two of candle's hints are supported: `Init::Const`, and `Init::Randn`, truncated at 3 standard deviations. Element i
/// is `mean + stdev F^-1(u)`, where F is the truncated distribution and u the i-th uniform number of 32 bits from a
/// counter-based generator (Philox4x32-10). Values are computed in f64 and rounded to f32, and from f32 to half
/// precision, so models of different dtypes start from the same point.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = tallow::nn::seeded(7, DType::F32, &Device::Cpu);
/// let layer = tallow::nn::Linear::new(8, 4, vb)?;
/// assert_eq!(layer.weight().dims(), [4, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn seeded(seed: u64, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Seeded { seed }), dtype, device.clone())
}

struct Seeded {
    seed: u64,
}

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let value = match init {
            Init::Const(value) => Tensor::full(value, shape, device)?.to_dtype(dtype),
            Init::Randn { mean, stdev } => {
                let normal = (mean, stdev);
                match dtype {
                    DType::F64 => self.draw::<f64>(name, normal, shape, device),
                    DType::F32 => self.draw::<f32>(name, normal, shape, device),
                    DType::BF16 => self.draw::<bf16>(name, normal, shape, device),
                    DType::F16 => self.draw::<f16>(name, normal, shape, device),
                    other => self
                        .draw::<f64>(name, normal, shape, &Device::Cpu)?
                        .to_dtype(other)?
                        .to_device(device),
                }
            }
            other => Err(Error::Msg(format!(
                "{name}: a seeded builder draws Init::Randn and Init::Const, not {other:?}"
            ))),
        };
        Ok(ops::variable_of(&value?)?.into_inner())
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        Err(Error::Msg(format!(
            "{name}: a seeded builder needs the shape, use get_with_hints"
        )))
    }

    fn contains_tensor(&self, _name: &str) -> bool {
        true
    }
}

impl Seeded {
    /// Draws values on the GPU if it has a kernel, else on the host.
    fn draw<T: Stored>(
        &self,
        name: &str,
        normal: (f64, f64),
        shape: Shape,
        device: &Device,
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = device
            && T::DTYPE != DType::F64
            && cuda::source::is_supported(gpu)
        {
            let (stream, (mean, std)) = (stream(self.seed, name), normal);
            let storage = on_gpu::alloc_uninit(gpu, T::DTYPE, shape.elem_count())?;
            cuda::normal::normal(gpu, stream, mean, std, on_gpu::whole(&storage)?)?;
            return Ok(on_gpu::tensor(storage, shape));
        }
        crate::hardware::check_threads()?;
        let values = truncated_normal::<T>(self.seed, name, normal, shape.elem_count());
        let bytes = (shape.elem_count() as u64).saturating_mul(size_of::<T>() as u64);
        let values = values.map_err(|_| hardware::not_granted(name, bytes))?;
        Tensor::from_vec(values, shape, device)
    }
}

/// Draws `n` normal values truncated at 3 standard deviations, a function of seed and name alone.
fn truncated_normal<T: Stored>(
    seed: u64,
    name: &str,
    (mean, std): (f64, f64),
    n: usize,
) -> std::result::Result<Vec<T>, TryReserveError> {
    let stream = stream(seed, name);
    filled(n, |values| cpu::normal::normal(stream, mean, std, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_cut_are_those_of_a_truncated_normal() {
        let values: Vec<f64> = truncated_normal(1, "w", (0.5, 2.0), 200_000).unwrap();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        // Cut at 3: variance 0.97334 of the normal's.
        assert!((variance / 4.0 - 0.97334).abs() < 0.01, "{variance}");
        assert!(values.iter().all(|v| (v - 0.5).abs() <= 6.0));
    }

    #[test]
    fn threads_do_not_matter_and_names_do() {
        let n = 50_005; // several tasks, and a part of one
        let draw = |threads: usize, name: &str| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.map(|pool| {
                pool.install(|| truncated_normal::<f64>(3, name, (0.0, 1.0), n).unwrap())
            })
            .unwrap()
        };
        assert_eq!(draw(1, "a"), draw(3, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
    }
}
