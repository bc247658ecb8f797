//! The breakdown of a layer: its forward is traced, and followed through backward.

use super::letters::{Letter, Letters};
use super::lifetimes::{Buffer, Lifetimes};
use super::naming::Naming;
use super::{Kernels, MemoryBreakdown, MemoryKind, Mode};
use crate::Result;
use crate::grad::with_grad;
use crate::graph::{self, Graph};
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::outside;
use candle_core::Tensor;

/// A layer, and what its breakdown is written with.
pub(super) struct Layer<'a, W> {
    pub workload: &'a W,
    pub forward: fn(&W) -> Result<Tensor>,
    pub kernels: Kernels,
    /// What is there before it.
    pub residents: Vec<Buffer>,
    /// Elements of the largest tensor.
    pub largest: f64,
    /// Its sizes,
    pub letters: Vec<Letter>,
    /// and a workload in which each is multiplied as they say.
    pub other: W,
    /// What the letters stand for.
    pub sizes: String,
}

/// What a layer holds at the worst moment of forward and backward.
///
/// # Errors
/// Those of forward.
pub(super) fn breakdown<W>(layer: Layer<'_, W>) -> Result<MemoryBreakdown> {
    if layer.largest * (size_of::<f64>() as f64) >= isize::MAX as f64 {
        return Ok(beyond(layer.sizes, &layer.residents));
    }
    let of = |workload: &W| traced(layer.kernels, true, || (layer.forward)(workload));
    let graph = of(layer.workload)?;
    let most_bytes = layer.largest * MOST_SCALED * size_of::<f64>() as f64;
    let is_addressable = most_bytes < isize::MAX as f64;
    let other = is_addressable.then(|| of(&layer.other).ok()).flatten();
    let letters = Letters::new(&graph, layer.letters, other);
    let lifetimes = Lifetimes::of(&graph, Mode::ForwardBackward, layer.residents);
    let naming = Naming {
        graph: &graph,
        letters: &letters,
    };
    let mut breakdown = naming.breakdown(layer.sizes, &lifetimes);
    for part in &mut breakdown.parts {
        if part.kind == MemoryKind::Logits {
            part.kind = MemoryKind::Activations; // a layer returns none
        }
    }
    Ok(breakdown)
}

/// By how much a tensor of the other workload is larger: naive attention's scores, B H T^2, by 3 7 5^2 and at most 4
/// for heads of an odd width.
const MOST_SCALED: f64 = 2100.0;

/// Of sizes that no graph can have: one tensor alone cannot be addressed.
pub(super) fn beyond(sizes: String, residents: &[Buffer]) -> MemoryBreakdown {
    let naming = Naming {
        graph: &Graph::default(),
        letters: &Letters::default(),
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
