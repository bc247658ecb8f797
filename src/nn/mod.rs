//! Layers: parameters with a forward.
//!
//! What lives here: the parts of a transformer, each usable alone, built from any candle
//! [`VarBuilder`] (a `VarMap`, a safetensors file, or [`seeded`], which starts training from a seed). What does not:
//! the arithmetic itself ([`crate::ops`]) and the whole model ([`crate::model`]). And what backward finds of them:
//! [`checkpoint`](checkpoint()) runs a function again instead of keeping its graph, [`release`] lets go of it in backward.
//!
//! A layer's parameters are candle [`Var`]s, which the caller can reach by name with [`Layer::parameters`].

mod attention;
mod block;
mod checkpoint;
mod checkpointing;
mod embedding;
mod init;
mod linear;
mod norm;
mod rotary;
mod swiglu;

pub use attention::CausalSelfAttention;
pub use block::TransformerBlock;
pub use checkpoint::{checkpoint, release};
pub use checkpointing::Checkpointing;
pub use embedding::Embedding;
pub use init::seeded;
pub use linear::Linear;
pub(crate) use norm::check_eps;
pub use norm::{LayerNorm, RmsNorm};
pub use rotary::RotaryEmbedding;
pub use swiglu::SwiGlu;

use crate::ops;
use candle_core::{Module, Tensor, Var};
use candle_nn::VarBuilder;

/// Something with named parameters.
pub trait Layer {
    /// Hands every parameter to `visit` with its name under `path`, in a fixed order.
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Var));

    /// Every parameter with its name, in a fixed order.
    fn parameters(&self) -> Vec<(String, Var)> {
        let mut parameters = Vec::new();
        self.visit("", &mut |name, var| parameters.push((name, var.clone())));
        parameters
    }
}

/// `name` under `path`, as in a checkpoint.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_string()
    } else {
        format!("{path}.{name}")
    }
}

/// A variable of the builder's: shared with it where it keeps variables (a `VarMap`), new otherwise.
fn variable(
    vb: &VarBuilder<'_>,
    name: &str,
    shape: impl Into<candle_core::Shape>,
    init: candle_nn::Init,
) -> crate::Result<Var> {
    let shape = shape.into();
    ops::check_size("a parameter", shape.dims(), vb.dtype(), vb.device())?;
    Ok(Var::from_tensor(&vb.get_with_hints(shape, name, init)?)?)
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
    CausalSelfAttention,
    TransformerBlock
);
