//! Flash attention as an op of the graph.

#[cfg(feature = "cuda")]
use super::cuda;
use crate::attention::attributes;
use crate::graph::{Attribute, Target};
use crate::kernels::Dropout;
use crate::kernels::attention::Sizes;
use crate::kernels::workspace::flash_lse_parts;
use crate::ops::record::Spec;
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, Tensor};
use std::sync::{Arc, OnceLock};

/// A call of flash attention.
pub(super) struct Flash {
    pub sizes: Sizes,
    pub dropout: Option<Dropout>,
    /// The extra inputs: first keys, key mask and dropout key, if there are any.
    pub reads: Vec<Tensor>,
    /// Whether a GPU multiplies f32 in TF32. Backward follows forward, even if the switch has changed since: lse
    /// belongs to the scores that forward computed.
    pub tf32: bool,
    /// Receives the log-sum-exps and their rounding errors: (parts, B, H, Tq), with [`flash_lse_parts`] parts.
    pub lse: Arc<OnceLock<Tensor>>,
}

impl Flash {
    /// Returns (B, H, Tq, Dv).
    fn out_shape(&self) -> Shape {
        let Sizes {
            batch,
            heads,
            queries,
            value_dim,
            ..
        } = self.sizes;
        (batch, heads, queries, value_dim).into()
    }
}

impl Spec for Flash {
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let mut attributes = attributes(&self.sizes, self.dropout);
        if self.tf32 {
            attributes.push(("tf32", Attribute::Flag(true)));
        }
        attributes
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        self.reads.clone()
    }

    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.out_shape(), inputs[0].dtype)
    }

    /// lse, and in half precision the rounding error of the output (B, H, Tq, Dv).
    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (q, sizes) = (&inputs[0], &self.sizes);
        let parts = flash_lse_parts(q.dtype);
        let lse = (parts, sizes.batch, sizes.heads, sizes.queries).into();
        let mut kept = vec![("lse", lse, q.wide_dtype())];
        if q.wide_dtype() != q.dtype {
            kept.push(("rounded off", self.out_shape(), q.dtype));
        }
        kept
    }

    fn on_saved(&self, kept: &[Tensor]) {
        if let Some(lse) = kept.first() {
            let _ = self.lse.set(lse.clone()); // the same value if backward ran forward again
        }
    }

    #[cfg(feature = "cuda")]
    fn readable(&self, x: Tensor) -> Result<Tensor> {
        match x.device().is_cuda() {
            true => cuda::aligned_or_copied(x),
            false => Ok(x),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn readable(&self, x: Tensor) -> Result<Tensor> {
        Ok(x)
    }
}
