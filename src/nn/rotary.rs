//! Positions as rotations.

use super::RopeScaling;
use crate::ops::RotaryPairs;
use crate::{Error, Result, graph, ops};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What rotary position embedding is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryConfig {
    /// The base of the angles.
    pub theta: f64,
    /// Dh.
    pub head_dim: usize,
    /// How many positions there are.
    pub max_length: usize,
    /// Which elements of a head rotate together.
    pub pairs: RotaryPairs,
    /// How the angles are stretched.
    pub scaling: RopeScaling,
}

/// The cosines and sines of rotary position embedding, for positions up to a maximum.
///
/// Pair i of a head turns by `position * theta^(-2i / Dh)`, or as its [scaling](RopeScaling) says. The tables are
/// computed in f64 and rounded once; they are no parameters.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    pairs: RotaryPairs,
    /// (max_length, Dh/2).
    cos: Tensor,
    /// (max_length, Dh/2).
    sin: Tensor,
    /// What was read last: of one region of autocast, all layers read the same views, which it casts once.
    last: Arc<Mutex<Option<Rows>>>,
}

/// Rows of both tables.
#[derive(Clone, Debug)]
struct Rows {
    positions: Range<usize>,
    cos: Tensor,
    sin: Tensor,
}

impl RotaryEmbedding {
    /// Tables for positions `0..max_length` of heads of `head_dim` elements, whose adjacent elements are pairs.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
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
            pairs: RotaryPairs::Adjacent,
            scaling: RopeScaling::None,
        };
        Self::with_config(&config, dtype, device)
    }

    /// Tables of this configuration. In a [trace](crate::graph::trace()) they are hollow.
    ///
    /// # Errors
    /// An odd or zero `head_dim`, a zero `max_length`, a theta that is not positive, a scaling that is none, tables
    /// beyond the machine's memory.
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
        scaling.check()?;
        let half = head_dim / 2;
        if graph::is_tracing() {
            // What reads them is traced.
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
        ops::check_room(&what, wanted_bytes)?;
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
    /// Positions beyond the tables; otherwise as [`ops::rope_with()`].
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
