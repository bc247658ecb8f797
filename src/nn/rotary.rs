//! Rotary position embedding.

use super::RopeScaling;
use crate::ops::RotaryPairs;
use crate::{Error, Result, graph, ops};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The configuration of [`RotaryEmbedding`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{RotaryConfig, RotaryEmbedding};
/// use tallow::ops::RotaryPairs;
///
/// let config = RotaryConfig {
///     head_dim: 8, max_length: 64,
///     pairs: RotaryPairs::Halves, // as in Hugging Face's models
///     ..Default::default()
/// };
/// let rotary = RotaryEmbedding::with_config(&config, DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 2, 5, 8), DType::F32, &Device::Cpu)?; // (B, H, T, Dh)
/// assert_eq!(rotary.forward(&k, 59)?.dims(), k.dims());
/// assert!(rotary.forward(&k, 60).is_err()); // positions 60 to 64 of 0 to 63
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// Dh, the dimension of a head.
    pub head_dim: usize,
    /// The number of positions.
    pub max_length: usize,
    /// The elements of a head that form a pair.
    pub pairs: RotaryPairs,
    /// The scaling of the frequencies.
    pub scaling: RopeScaling,
}

impl Default for RotaryConfig {
    /// 1,024 positions of heads of dimension 64, with theta 10,000, adjacent pairs and no scaling.
    fn default() -> Self {
        Self {
            theta: 10_000.0,
            head_dim: 64,
            max_length: 1024,
            pairs: RotaryPairs::Adjacent,
            scaling: RopeScaling::None,
        }
    }
}

/// Rotary position embedding: tables of cosines and sines for positions up to a maximum.
///
/// Pair i of a head is rotated by the angle `position * theta^(-2i / Dh)`, whose frequency may be
/// [scaled](RopeScaling). The tables are computed in f64 and rounded once; they are not parameters.
///
/// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::RotaryEmbedding;
///
/// let rotary = RotaryEmbedding::new(10_000.0, 8, 64, DType::F32, &Device::Cpu)?;
/// let q = Tensor::ones((1, 2, 5, 8), DType::F32, &Device::Cpu)?; // (B, H, T, Dh)
/// let rotated = rotary.forward(&q, 0)?;
/// let first = rotated.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!(first, [1.0; 16]); // position 0 is not rotated
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    pairs: RotaryPairs,
    /// (max_length, Dh/2).
    cos: Tensor,
    /// (max_length, Dh/2).
    sin: Tensor,
    /// The rows of the last call. All layers read the same views, which an autocast region casts only once.
    last: Arc<Mutex<Option<Rows>>>,
}

/// Consecutive rows of both tables.
#[derive(Clone, Debug)]
struct Rows {
    positions: Range<usize>,
    cos: Tensor,
    sin: Tensor,
}

impl RotaryEmbedding {
    /// Creates tables for positions `0..max_length` and heads of dimension `head_dim`, with adjacent pairs.
    ///
    /// # Errors
    /// Those of [`with_config`](Self::with_config).
    pub fn new(
        theta: f64,
        head_dim: usize,
        max_length: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let config = RotaryConfig {
            theta,
            head_dim,
            max_length,
            ..Default::default()
        };
        Self::with_config(&config, dtype, device)
    }

    /// Creates tables by a configuration. Inside of a [trace](crate::graph::trace()) they are meta tensors; outside of
    /// it they are allocated, also for a model of meta weights.
    ///
    /// # Errors
    /// An odd or zero `head_dim`; a zero `max_length`; a theta that is not positive; an invalid scaling; tables that do
    /// not fit in memory.
    pub fn with_config(config: &RotaryConfig, dtype: DType, device: &Device) -> Result<Self> {
        let RotaryConfig {
            theta,
            head_dim,
            max_length,
            pairs,
            scaling,
        } = *config;
        let refuse = |field, expected: &str, got: String| {
            Err(Error::config("RotaryEmbedding", field, got).must_be(
                expected,
                "pair i turns by theta^(-2i / head_dim) at each position",
            ))
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return refuse("head_dim", "even and positive", head_dim.to_string());
        }
        if max_length == 0 {
            return refuse("max_length", "positive", max_length.to_string());
        }
        if !(theta > 0.0 && theta.is_finite()) {
            return refuse("theta", "positive and finite", theta.to_string());
        }
        scaling.check()?;
        let half = head_dim / 2;
        if graph::is_tracing() {
            let table = || graph::constant((max_length, half), dtype);
            return Ok(Self {
                pairs,
                cos: table()?,
                sin: table()?,
                last: Arc::default(),
            });
        }
        // Cosine and sine, in f64 while they are computed.
        let wanted_bytes = (max_length as u64).saturating_mul(16 * half as u64);
        let what = format!("rotary tables for {max_length} positions");
        ops::check_fits_memory(&what, wanted_bytes)?;
        ops::check_granted("rotary tables", wanted_bytes.saturating_mul(2))?; // and in their dtype
        let (frequencies, amplitude) = (scaling.frequencies(theta, head_dim), scaling.amplitude());
        let angles = (0..max_length)
            .flat_map(|position| frequencies.iter().map(move |each| position as f64 * each));
        let scaled = angles.map(|angle| (amplitude * angle.cos(), amplitude * angle.sin()));
        let (cos, sin): (Vec<f64>, Vec<f64>) = scaled.unzip();
        let table = |values| {
            let on_host = Tensor::from_vec(values, (max_length, half), &Device::Cpu)?;
            on_host.to_dtype(dtype)?.to_device(device)
        };
        Ok(Self {
            pairs,
            cos: table(cos)?,
            sin: table(sin)?,
            last: Arc::default(),
        })
    }

    /// Rotates x (..., T, Dh), whose first row is at position `start`.
    ///
    /// # Errors
    /// Positions beyond the tables; those of [`ops::rope_with()`].
    pub fn forward(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let max_length = self.cos.dim(0)?;
        let length = match x.dims() {
            [.., length, _] if start.saturating_add(*length) <= max_length => *length,
            dims => {
                return Err(Error::Shape {
                    op: "RotaryEmbedding",
                    expected: format!("x (..., T, Dh) with start + T up to {max_length}"),
                    got: format!("{dims:?} from position {start}"),
                    hint: "build the tables for a longer maximum".into(),
                });
            }
        };
        let rows = self.rows(start..start + length)?;
        ops::rope_with(x, &rows.cos, &rows.sin, self.pairs)
    }

    fn rows(&self, positions: Range<usize>) -> Result<Rows> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = last.as_ref().filter(|rows| rows.positions == positions) {
            return Ok(rows.clone());
        }
        let [cos, sin] =
            [&self.cos, &self.sin].map(|table| table.narrow(0, positions.start, positions.len()));
        let rows = Rows {
            positions,
            cos: cos?,
            sin: sin?,
        };
        *last = Some(rows.clone());
        Ok(rows)
    }
}
