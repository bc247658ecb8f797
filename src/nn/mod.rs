//! Layers: parameters with a forward.
//!
//! The parts of a transformer, each usable alone, built from any candle [`VarBuilder`]: a `VarMap`, a safetensors file,
//! or [`seeded`], which draws initial weights from a seed. The arithmetic is in [`ops`], the whole model in
//! [`model`](crate::model). [`checkpoint`](checkpoint()) runs a function again in backward instead of keeping its
//! graph.
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
//! A layer holds its weights as tensors, which [`Layer::weights`] lists by name. A weight may be the tensor of a
//! variable, which is trained and which [`Layer::parameters`] lists as a candle [`Var`]; a plain tensor, which is
//! frozen; or a tensor that another layer holds too, which is tied. Builders make variables of what they give;
//! `from_weights` takes any tensor. [`Parameter`] is a weight that belongs to no layer.

mod architecture;
mod attention;
mod block;
mod checkpoint;
mod checkpointing;
mod context;
mod embedding;
mod gated_mlp;
mod gelu_mlp;
mod init;
mod linear;
mod norm;
mod parameter;
mod rope_scaling;
mod rotary;

pub use architecture::Architecture;
pub(crate) use architecture::Norm;
pub use attention::{CausalSelfAttention, SelfAttentionConfig};
pub use block::TransformerBlock;
pub use checkpoint::checkpoint;
pub use checkpointing::Checkpointing;
pub use context::{DropoutRates, ForwardContext};
pub use embedding::Embedding;
pub use gated_mlp::{GeGlu, SwiGlu};
pub use gelu_mlp::GeluMlp;
pub use init::seeded;
pub use linear::Linear;
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

/// Something with named weights.
///
/// A layer of your own visits the layers it is made of:
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
/// let layer = Normed { norm: RmsNorm::new(4, 1e-5, vb.pp("norm"))?, map: Linear::new(4, 2, vb.pp("map"))? };
/// let names: Vec<String> = layer.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["norm.weight", "map.weight"]);
/// # Ok::<(), tallow::Error>(())
/// ```
pub trait Layer {
    /// Hands every weight to `visit` with its name under `path`, in a fixed order.
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor));

    /// Every weight with its name, in a fixed order: frozen ones too, and a tied one under each of its names.
    fn weights(&self) -> Vec<(String, Tensor)> {
        let mut weights = Vec::new();
        self.visit("", &mut |name, weight| weights.push((name, weight.clone())));
        weights
    }

    /// Every variable with its name, in a fixed order, a tied one once, under the first: what an optimizer trains.
    fn parameters(&self) -> Vec<(String, Var)> {
        let mut seen = HashSet::new();
        let mut parameters = Vec::new();
        self.visit("", &mut |name, weight| {
            // Of a variable's tensor this is the variable itself, not a copy.
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

/// `name` under `path`, as in a checkpoint: `layers.0` and `ffn` are `layers.0.ffn`.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_string()
    } else {
        format!("{path}.{name}")
    }
}

/// The tensor of a variable: the builder's own where it gives variables (a `VarMap`, [`seeded`]), new otherwise.
fn variable(
    vb: &VarBuilder<'_>,
    name: &str,
    shape: impl Into<candle_core::Shape>,
    init: candle_nn::Init,
) -> Result<Tensor> {
    let shape = shape.into();
    match ops::check_size("a parameter", shape.dims(), vb.dtype(), vb.device()) {
        Err(Error::OutOfMemory { .. }) if graph::gives_hollow(vb) => {} // it takes none
        checked => checked?,
    }
    let weight = vb.get_with_hints(shape.clone(), name, init);
    let weight = weight.map_err(|error| not_given(vb, name, &shape, error))?;
    Ok(ops::variable_of(&weight)?.into_inner())
}

/// As errors say that a builder has no such weight.
fn not_given(
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

/// Refuses a weight that `fits` not.
fn check_weight(op: &'static str, expected: &str, weight: &Tensor, fits: bool) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::shape(op, format!("{:?}", weight.dims()))
        .must_be(expected, "weights are stored (out, in)"))
}

/// candle's `Module`, for `.apply(&layer)` and `Sequential`.
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
    GeluMlp,
    CausalSelfAttention,
    TransformerBlock
);
