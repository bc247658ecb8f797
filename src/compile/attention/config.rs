//! What attention is planned for.

use super::OP;
use crate::attention::{Algorithm, AttentionConfig, flash::MAX_HEAD_DIM};
use crate::kernels::attention::Sizes;
use crate::kernels::workspace;
use crate::{Error, Result, hardware};
use candle_core::{DType, Device, Shape};

/// The shapes of q, k and v, their dtype, and how they attend.
///
/// ```
/// use candle_core::DType;
/// use tallow::attention::{AttentionConfig, Mask};
/// use tallow::compile::AttentionPlanConfig;
///
/// let itself = AttentionPlanConfig::new((2, 8, 512, 64), DType::BF16); // q, k and v (B, H, T, Dh)
/// let grouped = AttentionPlanConfig {
///     k: (2, 2, 768, 64).into(), // (B, Hkv, Tk, Dh): four heads of q share one
///     v: (2, 2, 768, 64).into(),
///     attention: AttentionConfig { mask: Mask::CausalEnd, ..Default::default() },
///     ..itself
/// };
/// # let _ = grouped;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPlanConfig {
    /// (..., H, Tq, Dh).
    pub q: Shape,
    /// (..., Hkv, Tk, Dh), where Hkv divides H: each head of k and v serves H / Hkv heads of q in a row.
    pub k: Shape,
    /// (..., Hkv, Tk, Dv). Dv is Dh for flash attention.
    pub v: Shape,
    /// Of q, k, v, the output and the gradients: f32, bf16 or f16.
    pub dtype: DType,
    /// What computes it.
    pub algorithm: Algorithm,
    /// Mask and scale.
    pub attention: AttentionConfig,
}

impl AttentionPlanConfig {
    /// Naive self-attention without a mask: q, k and v of one shape, (..., T, Dh).
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        let shape = shape.into();
        Self {
            q: shape.clone(),
            k: shape.clone(),
            v: shape,
            dtype,
            algorithm: Algorithm::Naive,
            attention: AttentionConfig::default(),
        }
    }

    /// An error unless plans take the dtype and the sizes. Whether the shapes fit each other, the trace finds out.
    pub(super) fn check(&self) -> Result<()> {
        self.attention.refuse_dropout(OP)?;
        if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::DType {
                op: OP,
                expected: "f32, bf16 or f16".into(),
                got: self.dtype.as_str().into(),
                hint: "attention::naive and attention::flash take others".into(),
            });
        }
        for (what, shape) in [("q", &self.q), ("k", &self.k), ("v", &self.v)] {
            if shape.rank() < 2 || shape.dims().contains(&0) {
                return Err(Error::Shape {
                    op: OP,
                    expected: format!("{what} (..., T, Dh), each size at least 1"),
                    got: format!("{:?}", shape.dims()),
                    hint: "without queries or keys there is nothing to plan".into(),
                });
            }
        }
        let head_dim = self.sizes().head_dim;
        match self.algorithm == Algorithm::Flash && head_dim > MAX_HEAD_DIM {
            false => self.check_bytes(),
            true => Err(Error::Shape {
                op: OP,
                expected: format!("heads of at most {MAX_HEAD_DIM} for flash attention"),
                got: format!("{:?}", self.q.dims()),
                hint: "plan naive attention".into(),
            }),
        }
    }

    /// An error where the arena's size would overflow.
    fn check_bytes(&self) -> Result<()> {
        let sizes = self.sizes();
        let elements = |shape: &Shape| {
            shape
                .dims()
                .iter()
                .map(|size| *size as f64)
                .product::<f64>()
        };
        let inputs = [&self.q, &self.k, &self.v].map(elements);
        let scores = match self.algorithm {
            Algorithm::Naive => inputs[0] / sizes.head_dim as f64 * sizes.keys as f64,
            Algorithm::Flash => 0.0,
        };
        let most = 2f64.powi(56);
        // Scratch and gradients are of the inputs' order.
        let mut wanted_bytes = 4.0 * (scores + 8.0 * inputs.iter().sum::<f64>());
        if self.algorithm == Algorithm::Flash && wanted_bytes < most {
            wanted_bytes += 4.0 * workspace::flash_backward(&sizes) as f64; // a GPU's
        }
        match wanted_bytes < most {
            true => Ok(()),
            false => Err(Error::OutOfMemory {
                what: "the arena of a planned attention".into(),
                wanted_bytes: wanted_bytes as u64, // saturates
                available_bytes: hardware::available_bytes().unwrap_or(u64::MAX),
            }),
        }
    }

    /// As flash attention's kernels have them, of shapes that are [possible](Self::check); two dimensions are one head.
    fn sizes(&self) -> Sizes {
        let (batch, heads, queries, head_dim) = split(&self.q);
        let (_, kv_heads, keys, _) = split(&self.k);
        Sizes {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim: head_dim,
            mask: self.attention.mask,
            scale: self.attention.scale_for(head_dim),
        }
    }
}

/// (B, H, T, Dh): what stands before the heads multiplied, up to `usize::MAX`.
fn split(shape: &Shape) -> (usize, usize, usize, usize) {
    match *shape.dims() {
        [ref leading @ .., heads, length, width] => {
            let batch = leading
                .iter()
                .fold(1, |all: usize, x| all.saturating_mul(*x));
            (batch, heads, length, width)
        }
        [length, width] => (1, 1, length, width),
        _ => (1, 1, 1, 1),
    }
}

/// The devices that attention is planned on.
pub(super) fn check_device(device: &Device) -> Result<()> {
    match device {
        Device::Cpu | Device::Cuda(_) => Ok(()),
        Device::Metal(_) => Err(Error::Placement {
            op: OP,
            expected: "the CPU or a CUDA GPU".into(),
            got: format!("{:?}", device.location()),
            hint: "attention::naive and attention::flash run there".into(),
        }),
    }
}
