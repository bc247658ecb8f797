//! What a call is, and what memory it takes.

use crate::attention::attributes;
use crate::graph::{Attribute, Target};
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};
use crate::ops::lowering::Workspace;
use crate::ops::record::Spec;
use crate::ops::with_last_dim;
use crate::probe::Operand;
use candle_core::{DType, Shape, Tensor};
use std::sync::{Arc, OnceLock};

/// What forward and backward take for themselves on the CPU.
pub(super) fn workspaces(sizes: &Sizes, dtype: DType) -> [Workspace; 2] {
    let [forward, backward] = scratch_elements(sizes, dtype);
    let element_bytes = dtype.size_in_bytes().max(4);
    [
        Workspace {
            what: "heads in f32, packed",
            formula: "TD/H + blocks, a thread",
            elements: forward,
            element_bytes,
        },
        Workspace {
            what: "scores' gradient, packed",
            formula: "T^2 + blocks, a thread",
            elements: backward,
            element_bytes,
        },
    ]
}

/// Elements that forward and backward take for themselves on the CPU, in the dtype computed in: backward a matrix of
/// (Tq, Tk), both what half precision is widened to, head by head, and what products pack.
fn scratch_elements(sizes: &Sizes, dtype: DType) -> [f64; 2] {
    let Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        ..
    } = *sizes;
    let threads = rayon::current_num_threads();
    // As the kernel shares its matrices out.
    let (at_once, inside) = match sizes.matrices() < 2 * threads {
        true => (1.0, Threads::All),
        false => (threads as f64, Threads::One),
    };
    let element_bytes = dtype.size_in_bytes().max(size_of::<f32>());
    let [tq, tk, dh, dv] = [queries, keys, head_dim, value_dim].map(|size| size as f64);
    // q, k, v and out before it is rounded; q, k, v, dout, and dq, dk, dv before they are rounded.
    let widened = match dtype.size_in_bytes() < element_bytes {
        true => [
            tq * dh + tk * dh + tk * dv + tq * dv,
            2.0 * (tq * dh + tk * dh + tk * dv) + tq * dv,
        ],
        false => [0.0; 2],
    };
    let packed = |rows, depth, cols, a_transposed, b_transposed| {
        let sizes = ProductSizes {
            rows,
            depth,
            cols,
            a_transposed,
            b_transposed,
            element_bytes,
        };
        packing_bytes(sizes, inside) / element_bytes as f64
    };
    let scores = packed(queries, head_dim, keys, false, true); // q k^T
    let values = packed(queries, keys, value_dim, false, false); // p v
    let backward = [
        packed(queries, value_dim, keys, false, true), // dout v^T
        packed(queries, keys, head_dim, false, false), // ds k
        packed(keys, queries, value_dim, true, false), // p^T dout
        packed(keys, queries, head_dim, true, false),  // ds^T q
    ];
    [
        at_once * (widened[0] + scores.max(values)),
        at_once * (tq * tk + widened[1] + backward.into_iter().fold(0.0, f64::max)),
    ]
}

/// One call.
pub(super) struct Naive {
    pub(super) sizes: Sizes,
    /// The first keys, where there are any.
    pub(super) reads: Vec<Tensor>,
    /// Where the log-sum-exps are left, (..., H, Tq), if they are wanted: on the CPU.
    pub(super) lse: Option<Arc<OnceLock<Tensor>>>,
}

impl Spec for Naive {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let q = &inputs[0];
        (with_last_dim(q.dims, self.sizes.value_dim).into(), q.dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        attributes(self.sizes.scale, self.sizes.mask, None)
    }

    fn reads(&self) -> Vec<Tensor> {
        self.reads.clone()
    }

    fn kept(&self, inputs: &[Operand<'_>], on: Target) -> Vec<(&'static str, Shape, DType)> {
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

    fn has_kept(&self, kept: &[Tensor]) {
        if let (Some(place), [_, lse]) = (&self.lse, kept) {
            let _ = place.set(lse.clone()); // empty until now: an op runs forward once
        }
    }
}
