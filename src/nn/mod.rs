//! Layers: parameters and a forward pass.
//!
//! The layers of a transformer. Each works alone and is built from any candle [`VarBuilder`]: a `VarMap`, a safetensors
//! file, or [`seeded`], which draws initial weights from a seed. They call [`ops`];
//! [`TransformerLM`](crate::model::TransformerLM) is built of them. [`checkpoint`](checkpoint()) recomputes a function
//! in backward instead of saving its graph.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::nn::{self, Layer, RmsNorm, SwiGlu};
//! use tallow::ops;
//!
//! let vb = nn::seeded(0, DType::F32, &Device::Cpu);
//! let norm = RmsNorm::new(8, 1e-5, vb.pp("norm"))?;
//! let feed_forward = SwiGlu::new(8, 32, vb.pp("ffn"))?;
//! let x = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // (B, T, D)
//! let y = feed_forward.forward(&norm.forward(&x)?)?;
//! assert_eq!(y.dims(), [2, 3, 8]);
//!
//! let gradients = tallow::backward(ops::sum(&y)?)?;
//! let trained = [norm.parameters(), feed_forward.parameters()].concat();
//! assert!(trained.iter().all(|(_, weight)| gradients.get(weight).is_some()));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! A layer holds its weights as tensors, which [`Layer::weights`] lists by name. A weight is trained if it is the
//! tensor of a variable ([`Layer::parameters`] lists it as a candle [`Var`]), frozen if it is a plain tensor, and tied
//! if another layer holds the same tensor. Builders create variables; [`from_weights()`] is a builder of any tensors,
//! and [`freeze()`] freezes weights of any builder by name. A layer of `candle_nn` is converted with `try_from`, which
//! shares its weights. [`Parameter`] is a weight outside of a layer. With feature `files`, `save` and `load` write and
//! read the weights of any layer or model.

mod architecture;
mod attention;
mod block;
mod builder;
mod checkpoint;
mod checkpointing;
mod context;
mod embedding;
#[cfg(feature = "files")]
mod file;
mod gated_mlp;
mod init;
mod linear;
mod mlp;
mod norm;
mod parameter;
mod rope_scaling;
mod rotary;

pub use architecture::Architecture;
pub(crate) use architecture::Norm;
pub use attention::{Attention, AttentionLayerConfig};
pub use block::TransformerBlock;
pub(crate) use builder::keeps_frozen;
pub use builder::{freeze, from_weights};
pub use checkpoint::checkpoint;
pub use checkpointing::Checkpointing;
pub use context::{DropoutRates, ForwardContext};
pub use embedding::Embedding;
#[cfg(feature = "files")]
pub use file::{load, save};
pub use gated_mlp::{GeGlu, SwiGlu};
pub use init::seeded;
pub use linear::Linear;
pub use mlp::{Activation, Mlp};
pub(crate) use norm::check_eps;
pub use norm::{LayerNorm, RmsNorm};
pub use parameter::Parameter;
pub use rope_scaling::RopeScaling;
pub use rotary::{RotaryConfig, RotaryEmbedding};

use crate::{Error, Result, graph, ops};
use candle_core::{Module, Tensor, Var};
use candle_nn::VarBuilder;
use std::collections::HashSet;
use std::path::Path;

/// A layer or a model: anything with named weights.
///
/// A custom layer visits the layers that it contains:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Layer, Linear, RmsNorm};
///
/// struct Normed {
///     norm: RmsNorm,
///     map: Linear,
/// }
///
/// impl Layer for Normed {
///     fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
///         self.norm.visit(&nn::join(path, "norm"), visit);
///         self.map.visit(&nn::join(path, "map"), visit);
///     }
/// }
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let layer = Normed {
///     norm: RmsNorm::new(4, 1e-5, vb.pp("norm"))?,
///     map: Linear::new(4, 2, vb.pp("map"))?,
/// };
/// let names: Vec<String> = layer.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["norm.weight", "map.weight"]);
/// # Ok::<(), tallow::Error>(())
/// ```
pub trait Layer {
    /// Calls `visit` with each weight and its name under `path`, in a fixed order.
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor));

    /// Returns every weight with its name, in a fixed order. Frozen weights are included; a tied weight is listed under
    /// each of its names.
    fn weights(&self) -> Vec<(String, Tensor)> {
        let mut weights = Vec::new();
        self.visit("", &mut |name, weight| weights.push((name, weight.clone())));
        weights
    }

    /// Returns every trained weight with its name, in a fixed order. A tied weight is listed once, under its first
    /// name.
    fn parameters(&self) -> Vec<(String, Var)> {
        let mut seen = HashSet::new();
        let mut parameters = Vec::new();
        self.visit("", &mut |name, weight| {
            // from_tensor returns the variable itself for a variable's tensor, not a copy.
            if weight.is_variable()
                && seen.insert(weight.id())
                && let Ok(var) = Var::from_tensor(weight)
            {
                parameters.push((name, var));
            }
        });
        parameters
    }
}

/// Joins names as checkpoints do: `layers.0` and `ffn` become `layers.0.ffn`.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_string()
    } else {
        format!("{path}.{name}")
    }
}

/// Gets a weight from a builder: as a variable, the builder's own if it returns variables (a `VarMap`, [`seeded`]),
/// else a new one; or as the builder's tensor, if the builder [freezes](keeps_frozen) it.
fn variable(
    vb: &VarBuilder<'_>,
    name: &str,
    shape: impl Into<candle_core::Shape>,
    init: candle_nn::Init,
) -> Result<Tensor> {
    let shape = shape.into();
    match ops::check_size("a parameter", shape.dims(), vb.dtype(), vb.device()) {
        Err(Error::OutOfMemory { .. }) if graph::builds_meta(vb) => {} // a meta tensor has no data
        checked => checked?,
    }
    let weight = vb.get_with_hints(shape.clone(), name, init);
    let weight = weight.map_err(|error| missing_weight(vb, name, &shape, error))?;
    match weight.is_variable() || keeps_frozen(vb, name) {
        true => Ok(weight),
        false => Ok(ops::variable_of(&weight)?.into_inner()),
    }
}

/// Converts the error of a builder without such a weight.
fn missing_weight(
    vb: &VarBuilder<'_>,
    name: &str,
    shape: &candle_core::Shape,
    error: candle_core::Error,
) -> Error {
    let mut cause = &error;
    while let candle_core::Error::WithBacktrace { inner, .. } = cause {
        cause = inner;
    }
    let got = match cause {
        candle_core::Error::CannotFindTensor { .. } => "no such weight".to_string(),
        candle_core::Error::UnexpectedShape { got, .. } => format!("{:?}", got.dims()),
        _ => return error.into(),
    };
    Error::Weight {
        path: Path::new("VarBuilder").into(),
        name: join(&vb.prefix(), name),
        expected: format!("{:?}", shape.dims()),
        got,
        hint: "does the configuration belong to the builder's file or variables?".into(),
    }
}

/// Returns an error unless `fits`.
fn check_weight(op: &'static str, expected: &str, weight: &Tensor, fits: bool) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::shape(op, format!("{:?}", weight.dims()))
        .must_be(expected, "weights are stored (out, in)"))
}

/// Implements candle's `Module`, for `.apply(&layer)` and `Sequential`.
macro_rules! impl_module {
    ($($layer:ty),*) => {$(
        impl Module for $layer {
            fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
                Ok(<$layer>::forward(self, x)?)
            }
        }
    )*};
}
impl_module!(
    Linear,
    Embedding,
    RmsNorm,
    LayerNorm,
    SwiGlu,
    GeGlu,
    Mlp,
    Attention,
    TransformerBlock
);
