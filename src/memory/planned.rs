//! The memory of plans: of any plan, and of plans of attention or a self-attention layer.

use super::MemoryKind::{self, Inputs, Scratch};
use super::{AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload, Target, Term};
use crate::compile::buffer::{Buffer, Category};
use crate::compile::{Batch, Plan, PlanKind, Step, StepConfig};
use crate::report::counted;
use crate::{Error, Result, hardware};
use candle_core::Device;

/// Returns the peak memory of forward and [backward](Step::forward_backward_from) of a planned [`Step`] of attention
/// alone, whose parameters are q, k and v, on `kernels`.
///
/// The plan's sizes are exact. On a GPU the 32 MiB workspace of cuBLASLt is included, on the CPU the kernels' workspace
/// for all threads of the current pool, as a term of its own.
///
/// The whole arena stays allocated after the first run. Its terms are those of [`planned_breakdown`].
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{AttentionWorkload, Target, planned_attention_breakdown};
///
/// let naive = AttentionWorkload { sequence_length: 512, ..Default::default() };
/// let flash = AttentionWorkload { algorithm: Algorithm::Flash, ..naive };
/// let [naive, flash] = [naive, flash]
///     .map(|workload| planned_attention_breakdown(&workload, Target::Cpu));
/// assert!(flash?.before_backward_bytes < naive?.before_backward_bytes);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`Step::plan_for`]; [`Error::OutOfMemory`] for a tensor larger than the address space.
pub fn planned_attention_breakdown(
    workload: &AttentionWorkload,
    kernels: Target,
) -> Result<MemoryBreakdown> {
    let w = workload;
    check_addressable(w.dtype.size_in_bytes() as f64 * w.largest(), &Device::Cpu)?;
    let (kind, config) = (PlanKind::Gradients, StepConfig::default());
    let plan = Step::plan_for(kernels, kind, &config, Batch::new([]), |_| w.forward())?;
    Ok(with_kernel_workspace(&plan, w.sizes(), kernels))
}

/// Returns the memory of a plan for these sizes, and on the CPU the largest workspace of a kernel.
fn with_kernel_workspace(plan: &Plan, sizes: String, kernels: Target) -> MemoryBreakdown {
    let mut breakdown = planned_breakdown(plan);
    breakdown.sizes = sizes;
    let workspace = plan.kernel_workspace().filter(|_| kernels == Target::Cpu);
    let term = workspace.map(|own| {
        let (elements, width) = (own.elements, own.element_bytes);
        Term::new(Scratch, own.what, own.formula, elements, width)
    });
    breakdown.terms.extend(term);
    breakdown
}

/// Returns the peak memory of forward and [backward](Step::forward_backward_from) of a planned [`Step`] of a
/// self-attention layer on `device`; backward starts from its output's gradient.
///
/// The plan's sizes are exact. Weights (f32), the input with the step's copy of it, and the output's gradient are
/// included; on a GPU also the 32 MiB workspace of cuBLASLt, on the CPU the kernels' workspace for all threads of the
/// current pool. There is no optimizer.
///
/// ```
/// use tallow::memory::{SelfAttentionWorkload, planned_self_attention_breakdown};
///
/// let device = tallow::device("cpu")?;
/// let short = SelfAttentionWorkload { sequence_length: 64, ..Default::default() };
/// let long = SelfAttentionWorkload { sequence_length: 256, ..short };
/// let [short, long] = [short, long]
///     .map(|workload| planned_self_attention_breakdown(&workload, &device));
/// assert!(short?.peak_bytes() < long?.peak_bytes());
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`Step::plan_for`]; [`Error::OutOfMemory`] for a tensor larger than the address space.
pub fn planned_self_attention_breakdown(
    workload: &SelfAttentionWorkload,
    device: &Device,
) -> Result<MemoryBreakdown> {
    let w = workload;
    let [_, x_elements, largest] = w.elements();
    check_addressable(4.0 * largest, device)?;
    let (layer, x) = w.layer()?;
    let config = StepConfig {
        precision: w.precision,
        ..Default::default()
    };
    let kind = PlanKind::Gradients;
    let plan = Step::plan_for(device, kind, &config, [("x", &x)], |inputs| {
        layer.forward(&inputs.get("x")?)
    })?;
    let [b, t, d, h] = [w.batch_size, w.sequence_length, w.d_model, w.heads];
    let sizes = format!("B {b}, T {t}, D {d}, H {h}");
    let mut breakdown = with_kernel_workspace(&plan, sizes, Target::of(device));
    let x = Term::new(
        Inputs,
        "x, of which the plan has a copy",
        "BTD",
        x_elements,
        4,
    );
    breakdown.before_backward_bytes = breakdown.before_backward_bytes.saturating_add(x.bytes);
    breakdown.terms.insert(0, x);
    Ok(breakdown)
}

/// Returns the memory of a plan ([`Plan::total_bytes`]), by category. For the arena it lists the buffers alive at the
/// call where most bytes are alive, and the rest of the arena as the term `unused at the peak`. Parameters, optimizer
/// state, inputs and a GPU's workspace, which are outside of the arena, are listed too. All sizes are exact and known
/// before anything runs, for any plan: a model's step on one of several ranks, with accumulation, within a memory
/// budget. The scratch memory of kernels on the CPU is [not included](crate::compile#what-a-plan-is-exact-about).
///
/// ```
/// use tallow::compile::{Batch, Step, StepConfig, StepRanks, Target};
/// use tallow::distributed::{FullyShardConfig, Shard};
/// use tallow::memory::{MemoryKind, planned_breakdown};
/// use tallow::model::{TransformerConfig, TransformerLM};
///
/// let own = Shard { rank: 0, world_size: 8 };
/// let ranks = StepRanks::FullySharded(FullyShardConfig::default(), own);
/// let config = StepConfig { ranks, ..Default::default() };
/// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
/// let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &config, Batch::meta(4, 256)?)?;
/// let breakdown = planned_breakdown(&plan);
/// assert_eq!(breakdown.peak_bytes(), plan.total_bytes());
/// let state = breakdown.bytes_of(MemoryKind::Optimizer);
/// assert!(state < 8 * 128_625_408 / 8 + 1000); // 8 bytes a parameter, an eighth of them
/// println!("{breakdown}");
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn planned_breakdown(plan: &Plan) -> MemoryBreakdown {
    let buffers = || plan.buffers().iter();
    let moment = plan.max_live_call();
    let is_alive = |buffer: &&Buffer| buffer.live.contains(&moment);
    let mut in_arena = 0;
    let mut terms = Vec::new();
    for category in Category::ALL {
        let of_category = || buffers().filter(|buffer| buffer.category == category);
        let elsewhere = of_category().filter(|buffer| !buffer.is_in_arena());
        let alive = of_category()
            .filter(|buffer| buffer.is_in_arena())
            .filter(is_alive);
        let [elsewhere, alive] = [
            elsewhere.map(Buffer::bytes).sum::<u64>(),
            alive.map(Buffer::bytes).sum(),
        ];
        in_arena += alive;
        for (bytes, place) in [(elsewhere, "its own memory"), (alive, "of the arena")] {
            if bytes > 0 {
                let (kind, what) = (kind_of(category), category.name());
                terms.push(Term::new(kind, what, place, bytes as f64, 1));
            }
        }
    }
    let unused = plan.arena_bytes().saturating_sub(in_arena);
    for (bytes, what, place) in [
        (unused, "unused at the peak", "of the arena"),
        (plan.workspace_bytes(), "workspace", "outside the arena"),
    ] {
        if bytes > 0 {
            terms.push(Term::new(Scratch, what, place, bytes as f64, 1));
        }
    }
    let outside_arena = plan.total_bytes() - plan.arena_bytes();
    MemoryBreakdown {
        before_backward_bytes: outside_arena + plan.live_bytes_before(plan.backward_begins()),
        ..MemoryBreakdown::new(
            format!("A plan of {}", counted(plan.calls().len(), "call")),
            terms,
        )
    }
}

fn kind_of(category: Category) -> MemoryKind {
    match category {
        Category::Parameter => MemoryKind::Weights,
        Category::WeightCopy => MemoryKind::WeightCasts,
        Category::OptimizerState => MemoryKind::Optimizer,
        Category::Input => MemoryKind::Inputs,
        Category::Output => MemoryKind::Logits,
        Category::Gradient => MemoryKind::Gradients,
        Category::Activation => MemoryKind::Activations,
        Category::Temporary | Category::Scratch => MemoryKind::Scratch,
    }
}

fn check_addressable(largest_bytes: f64, device: &Device) -> Result<()> {
    if largest_bytes < isize::MAX as f64 {
        return Ok(());
    }
    Err(Error::OutOfMemory {
        what: "a planned layer".into(),
        wanted_bytes: largest_bytes as u64, // saturates
        available_bytes: hardware::available_bytes_on(device).unwrap_or(u64::MAX),
    })
}
