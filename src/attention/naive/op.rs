//! Naive attention as an op of the graph, and its scratch memory.

use crate::attention::attributes;
use crate::graph::{Attribute, Target};
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::attention::naive::scratch_elements;
use crate::ops::lowering::Workspace;
use crate::ops::record::Spec;
use crate::ops::with_last_dim;
use crate::probe::Operand;
use candle_core::{DType, Shape, Tensor};
use std::sync::{Arc, OnceLock};

/// Returns the scratch memory of forward and backward on the CPU.
pub(super) fn workspaces(sizes: &Sizes, dtype: DType) -> [Workspace; 2] {
    let [forward, backward] = scratch_elements(sizes, rayon::current_num_threads());
    let element_bytes = dtype.size_in_bytes().max(4);
    [
        Workspace {
            what: "scratch of the kernel",
            formula: "2TD/H + 64T, a thread",
            elements: forward,
            element_bytes,
        },
        Workspace {
            what: "scratch of the kernel",
            formula: "4TD/H + 128T, a thread, and sums of few heads",
            elements: backward,
            element_bytes,
        },
    ]
}

/// A call of naive attention.
pub(super) struct Naive {
    pub(super) sizes: Sizes,
    /// The first keys, if there are any.
    pub(super) reads: Vec<Tensor>,
    /// Receives the log-sum-exps (..., H, Tq) if they are requested (on the CPU only).
    pub(super) lse: Option<Arc<OnceLock<Tensor>>>,
}

impl Spec for Naive {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let q = &inputs[0];
        (with_last_dim(q.dims, self.sizes.value_dim).into(), q.dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        attributes(&self.sizes, None)
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        self.reads.clone()
    }

    fn saved(&self, inputs: &[Operand<'_>], on: Target) -> Vec<(&'static str, Shape, DType)> {
        let (q, keys) = (&inputs[0], self.sizes.keys);
        let dtype = match on {
            Target::Cuda => q.dtype,
            Target::Cpu => q.wide_dtype(),
        };
        let probabilities = with_last_dim(q.dims, keys).into();
        let lse = self.lse.iter();
        let lse = lse.map(|_| ("lse", q.dims[..q.dims.len() - 1].into(), q.wide_dtype()));
        [("probabilities", probabilities, dtype)]
            .into_iter()
            .chain(lse)
            .collect()
    }

    fn on_saved(&self, kept: &[Tensor]) {
        if let (Some(place), [_, lse]) = (&self.lse, kept) {
            let _ = place.set(lse.clone()); // empty until now: an op runs forward once
        }
    }
}
