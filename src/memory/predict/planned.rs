//! The memory of planned attention: the plan's.

use super::layer::traced;
use super::{AttentionWorkload, Kernels, MemoryBreakdown, MemoryKind};
use crate::Result;
use crate::attention::{Algorithm, AttentionConfig};
use crate::compile::{Attention, AttentionPlanConfig, Category};
use crate::graph::MemoryStep;
use candle_core::Device;

/// What [`compile::Attention`](crate::compile::Attention) holds where `kernels` compute it, with its inputs: what its
/// plan says, exactly; on a GPU also the 32 MiB that cuBLASLt works in, for flash on the CPU what its kernels take for
/// themselves, if all threads of the pool that asks find work.
///
/// A plan has its whole arena before its first run, so all of it counts as there before backward.
///
/// # Errors
/// As [`Attention::plan_for`].
pub fn planned_attention_breakdown(
    workload: &AttentionWorkload,
    kernels: Kernels,
) -> Result<MemoryBreakdown> {
    let w = workload;
    let shape = (w.batch_size, w.heads, w.sequence_length, w.head_dim);
    let config = AttentionPlanConfig {
        algorithm: w.algorithm,
        attention: AttentionConfig {
            mask: w.mask,
            scale: None,
        },
        ..AttentionPlanConfig::new(shape, w.dtype)
    };
    let plan = match kernels {
        Kernels::Cpu => Attention::plan_for(&Device::Cpu, &config)?,
        Kernels::Cuda => Attention::plan_for_gpu(&config)?,
    };
    let inputs = plan.category_bytes(Category::Input);
    let kept = plan.category_bytes(Category::Activation);
    let rest = plan.peak_bytes() - kept;
    let sizes = format!(
        "B {}, H {}, T {}, Dh {}, {} bytes an element",
        w.batch_size,
        w.heads,
        w.sequence_length,
        w.head_dim,
        w.dtype.size_in_bytes()
    );
    let width = w.dtype.size_in_bytes();
    let elements = |bytes: u64| bytes as f64 / width as f64;
    let mut buffers = plan.buffers().iter();
    let kept_buffer = buffers.find(|buffer| buffer.category == Category::Activation);
    let kept_width = kept_buffer.map_or(width, |buffer| buffer.dtype.size_in_bytes());
    let (kept_name, kept_formula, rest_name) = match (w.algorithm, kernels) {
        (Algorithm::Naive, Kernels::Cpu) => (
            "exponentials, as the mask leaves them",
            "BHT^2",
            "the rest of the arena: out, dq, dk, dv, scratch",
        ),
        (Algorithm::Naive, Kernels::Cuda) => (
            "probabilities",
            "BHT^2",
            "the rest of the arena: out, dq, dk, dv, gradients of scores",
        ),
        (Algorithm::Flash, _) => (
            "a number a query; in half precision, what rounding took from out",
            "BHT + ..",
            "the rest of the arena: out, dq, dk, dv and, on a GPU, dq's sums",
        ),
    };
    let breakdown = MemoryBreakdown::new(sizes)
        .with(
            MemoryKind::Inputs,
            "q, k, v and out's gradient",
            "4BHTDh",
            elements(inputs),
            width,
        )
        .with(
            MemoryKind::Activations,
            kept_name,
            kept_formula,
            kept as f64 / kept_width as f64,
            kept_width,
        )
        .with(
            MemoryKind::Activations,
            rest_name,
            "4BHTDh + ..",
            elements(rest),
            width,
        );
    if (w.algorithm, kernels) == (Algorithm::Flash, Kernels::Cpu) {
        let graph = traced(kernels, true, || w.forward())?;
        let steps = graph
            .nodes()
            .flat_map(|node| node.forward.iter().chain(&node.backward));
        let rooms = steps.filter_map(|step| match step {
            MemoryStep::Take(room) | MemoryStep::Pass(room) => Some(room),
            _ => None,
        });
        let largest = rooms.max_by(|a, b| a.elements.total_cmp(&b.elements));
        return Ok(largest.into_iter().fold(breakdown, |breakdown, room| {
            let (what, formula) = (room.what, room.formula);
            breakdown.with(
                MemoryKind::Scratch,
                what,
                formula,
                room.elements,
                room.element_bytes,
            )
        }));
    }
    // There before backward too, as the arena is.
    Ok(match plan.workspace_bytes() {
        0 => breakdown,
        bytes => breakdown.with(
            MemoryKind::Activations,
            "workspace",
            "32 Mi",
            bytes as f64,
            1,
        ),
    })
}
