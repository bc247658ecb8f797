//! Initial values from a seed.

use crate::kernels::cpu::parallel::filled;
use candle_core::{DType, Device, Error, Result, Shape, Tensor, WithDType};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use half::{bf16, f16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use std::collections::TryReserveError;

/// Normal values are drawn again until they fall within this many standard deviations.
const CUT: f64 = 3.0;

/// Values drawn from one position of the random stream: fixed, so that threads do not matter.
const CHUNK: usize = 1 << 14;

/// Where chunk `i` starts in the stream, in words: far more than a chunk can use.
const CHUNK_WORDS: u128 = 1 << 32;

/// A builder whose tensors are drawn from `seed`: the same seed, name and shape give the same bits, in whatever order
/// they are asked for and on any number of threads.
///
/// It knows two of candle's hints: `Init::Randn`, here cut at 3 standard deviations, and `Init::Const`. Values are
/// drawn in f64 and rounded to `dtype`, so models of different dtypes start from the same point.
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
        match init {
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
        }
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
    /// Rounds each value as it is drawn: on the host, since f64 exists on no Metal device.
    fn draw<T: WithDType>(
        &self,
        name: &str,
        (mean, std): (f64, f64),
        shape: Shape,
        device: &Device,
    ) -> Result<Tensor> {
        let values = truncated_normal::<T>(self.seed, name, mean, std, shape.elem_count());
        Tensor::from_vec(values.map_err(Error::wrap)?, shape, device)
    }
}

/// `n` normal values cut at [`CUT`], a function of seed and name alone, rounded to `T`.
fn truncated_normal<T: WithDType>(
    seed: u64,
    name: &str,
    mean: f64,
    std: f64,
    n: usize,
) -> std::result::Result<Vec<T>, TryReserveError> {
    filled(n, |values| {
        values
            .par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(chunk, values)| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(fnv1a(name));
                rng.set_word_pos(chunk as u128 * CHUNK_WORDS);
                for value in values {
                    let mut z: f64 = StandardNormal.sample(&mut rng);
                    while z.abs() > CUT {
                        z = StandardNormal.sample(&mut rng);
                    }
                    *value = T::from_f64(mean + std * z);
                }
            });
    })
}

/// The 64-bit FNV-1a hash: stable across versions and platforms, which std's is not.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_cut_are_those_of_a_truncated_normal() {
        let values: Vec<f64> = truncated_normal(1, "w", 0.5, 2.0, 200_000).unwrap();
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
        let n = 3 * CHUNK + 5;
        let draw = |threads: usize, name: &str| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.map(|pool| pool.install(|| truncated_normal::<f64>(3, name, 0.0, 1.0, n).unwrap()))
                .unwrap()
        };
        assert_eq!(draw(1, "a"), draw(3, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
    }
}
