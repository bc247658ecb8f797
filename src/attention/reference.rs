//! Reference implementations of attention, composed of candle's own ops.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{self, AttentionConfig};
//!
//! let q = Tensor::randn(0f32, 1.0, (1, 2, 70, 8), &Device::Cpu)?; // (B, H, T, Dh)
//! let config = AttentionConfig::default();
//! let naive = attention::reference::naive(&q, &q, &q, &config)?;
//! let (flash, lse) = attention::reference::flash(&q, &q, &q, &config)?;
//! assert!((naive - flash)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
//! assert_eq!(lse.dims(), [1, 2, 70]);
//! # Ok::<(), tallow::Error>(())
//! ```

pub use super::flash::reference as flash;
pub use super::naive::reference as naive;
