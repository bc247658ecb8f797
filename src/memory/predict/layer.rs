//! The breakdown of a layer: its forward is traced, and replayed with its backward.

use super::naming::Naming;
use super::replay::{Buffer, replay};
use super::{Kernels, MemoryBreakdown, MemoryKind, Mode};
use crate::Result;
use crate::grad::with_grad;
use crate::graph::{self, Graph};
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::outside;
use candle_core::Tensor;

/// A layer, and what its breakdown is written with.
pub(super) struct Layer<'a, F> {
    pub forward: F,
    pub kernels: Kernels,
    /// What is there before it.
    pub residents: Vec<Buffer>,
    /// Elements of the largest tensor.
    pub largest: f64,
    pub letters: &'a [(&'static str, usize)],
    /// What the letters stand for.
    pub sizes: String,
}

/// What a layer holds at the worst moment of forward and backward.
///
/// # Errors
/// Those of forward.
pub(super) fn breakdown<F: FnOnce() -> Result<Tensor>>(
    layer: Layer<'_, F>,
) -> Result<MemoryBreakdown> {
    if layer.largest * (size_of::<f64>() as f64) >= isize::MAX as f64 {
        return Ok(beyond(layer.sizes, &layer.residents));
    }
    let graph = traced(layer.kernels, true, layer.forward)?;
    let mut outcome = replay(&graph, Mode::ForwardBackward, layer.residents, &[]);
    for buffer in &mut outcome.at_peak {
        if buffer.kind == MemoryKind::Logits {
            buffer.kind = MemoryKind::Activations; // a layer returns none
        }
    }
    let naming = Naming {
        graph: &graph,
        letters: layer.letters,
    };
    Ok(naming.breakdown(layer.sizes, &outcome))
}

/// Of sizes that no graph can have: one tensor alone cannot be addressed.
pub(super) fn beyond(sizes: String, residents: &[Buffer]) -> MemoryBreakdown {
    let naming = Naming {
        graph: &Graph::default(),
        letters: &[],
    };
    let breakdown = naming.of(sizes, residents);
    breakdown.with(
        MemoryKind::Activations,
        "more than can be addressed",
        "2^63 and more",
        f64::INFINITY,
        1,
    )
}

/// The graph of `forward` on these kernels, whatever region or policy the caller is in.
pub(super) fn traced(
    kernels: Kernels,
    keeps_graph: bool,
    forward: impl FnOnce() -> Result<Tensor>,
) -> Result<Graph> {
    let traced = || graph::trace(kernels, forward);
    let with_kernels = || with_kernel_policy(KernelPolicy::Prefer, traced);
    outside(|| with_grad(keeps_graph, with_kernels))
}
