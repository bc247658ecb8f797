//! Positions as rotations.

use crate::{Error, Result, graph, hardware, ops};
use candle_core::{DType, Device, Tensor};

/// The cosines and sines of rotary position embedding, for positions up to a maximum.
///
/// Pair i of a head turns by `position * theta^(-2i / Dh)`. The tables are computed in f64 and rounded once; they are
/// no parameters.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    /// (max_length, Dh/2).
    cos: Tensor,
    /// (max_length, Dh/2).
    sin: Tensor,
}

impl RotaryEmbedding {
    /// Tables for positions `0..max_length` of heads of `head_dim` elements. In a [trace](crate::graph::trace()) they
    /// are hollow.
    ///
    /// # Errors
    /// An odd or zero `head_dim`, a zero `max_length`, a theta that is not positive, tables beyond the
    /// machine's memory.
    pub fn new(
        theta: f64,
        head_dim: usize,
        max_length: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let refuse = |field, expected: &str, got: String| {
            Err(Error::config("RotaryEmbedding", field, got).must_be(
                expected,
                "pairs of elements turn by theta^(-2i / head_dim) a position",
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
        let half = head_dim / 2;
        if graph::is_tracing() {
            // What reads them is traced.
            let table = || graph::constant((max_length, half), dtype);
            return Ok(Self {
                cos: table()?,
                sin: table()?,
            });
        }
        // Cosine and sine, in f64 while they are computed.
        let wanted_bytes = (max_length as u64).saturating_mul(16 * half as u64);
        let available_bytes = hardware::total_bytes().unwrap_or(u64::MAX);
        if wanted_bytes > available_bytes {
            return Err(Error::OutOfMemory {
                what: format!("rotary tables for {max_length} positions"),
                wanted_bytes,
                available_bytes,
            });
        }
        let angles = (0..max_length).flat_map(|position| {
            (0..half).map(move |i| position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64))
        });
        let (cos, sin): (Vec<f64>, Vec<f64>) = angles.map(|a| (a.cos(), a.sin())).unzip();
        let table = |values| {
            let on_host = Tensor::from_vec(values, (max_length, half), &Device::Cpu)?;
            on_host.to_dtype(dtype)?.to_device(device)
        };
        Ok(Self {
            cos: table(cos)?,
            sin: table(sin)?,
        })
    }

    /// Rotates x (..., T, Dh), whose first row is at position `start`.
    ///
    /// # Errors
    /// Positions beyond the tables; otherwise as [`ops::rope()`].
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
        let cos = self.cos.narrow(0, start, length)?;
        let sin = self.sin.narrow(0, start, length)?;
        ops::rope(x, &cos, &sin)
    }
}
