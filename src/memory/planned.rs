//! The memory of plans: of any plan, and of plans of attention or a self-attention layer.

use super::MemoryKind::{self, Activations, Inputs, Scratch, Weights};
use super::{AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload, Target, Term};
use crate::attention::Algorithm;
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
/// The whole arena stays allocated after the first run. Activations are the bytes of it that are used before backward,
/// and scratch is the rest of the arena.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{AttentionWorkload, Target, planned_attention_breakdown};
///
/// let naive = AttentionWorkload { sequence_length: 512, ..Default::default() };
/// let flash = AttentionWorkload { algorithm: Algorithm::Flash, ..naive };
/// let [naive, flash] = [naive, flash].map(|workload| planned_attention_breakdown(&workload, Target::Cpu));
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
    let [leaves, d_out] = [Category::Parameter, Category::Input];
    let inputs = plan.category_bytes(leaves) + plan.category_bytes(d_out);
    let kept = plan.category_bytes(Category::Activation);
    let out = plan
        .live_bytes_before(plan.backward_begins())
        .saturating_sub(kept);
    let rest = plan.arena_bytes().saturating_sub(kept + out);
    let width = w.dtype.size_in_bytes();
    let elements = |bytes: u64| bytes as f64 / width as f64;
    let mut buffers = plan.buffers().iter();
    let kept_buffer = buffers.find(|buffer| buffer.category == Category::Activation);
    let kept_width = kept_buffer.map_or(width, |buffer| buffer.dtype.size_in_bytes());
    let (kept_name, kept_formula, rest_name) = match (w.algorithm, kernels) {
        (Algorithm::Naive, Target::Cpu) => (
            "probabilities",
            "BHT^2",
            "the rest of the arena: dq, dk, dv",
        ),
        (Algorithm::Naive, Target::Cuda) => (
            "probabilities",
            "BHT^2",
            "the rest of the arena: dq, dk, dv, gradients of scores",
        ),
        (Algorithm::Flash, _) => (
            "log-sum-exp; in half precision, rounding error of out",
            "BHT + ..",
            "the rest of the arena: dq, dk, dv and, on a GPU, dq's sums",
        ),
    };
    let kept = kept as f64 / kept_width as f64;
    let inputs_name = "q, k, v and out's gradient";
    let mut terms = vec![
        Term::new(Inputs, inputs_name, "4BHTDh", elements(inputs), width),
        Term::new(Activations, kept_name, kept_formula, kept, kept_width),
        Term::new(
            Activations,
            "out and sums of its rows",
            "BHTDh + ..",
            elements(out),
            width,
        ),
        Term::new(Scratch, rest_name, "3BHTDh + ..", elements(rest), width),
    ];
    if kernels == Target::Cpu {
        terms.extend(kernel_workspace(&plan));
    } else if plan.workspace_bytes() > 0 {
        // It is allocated before backward too.
        let bytes = plan.workspace_bytes() as f64;
        terms.push(Term::new(Activations, "workspace", "32 Mi", bytes, 1));
    }
    Ok(MemoryBreakdown::new(w.sizes(), terms))
}

/// Returns the term of the largest workspace of a kernel on the CPU.
fn kernel_workspace(plan: &Plan) -> Option<Term> {
    let workspace = plan.kernel_workspace()?;
    let (elements, width) = (workspace.elements, workspace.element_bytes);
    Some(Term::new(
        Scratch,
        workspace.what,
        workspace.formula,
        elements,
        width,
    ))
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
/// let [short, long] = [short, long].map(|workload| planned_self_attention_breakdown(&workload, &device));
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
    let [weights, x_elements, largest] = w.elements();
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
    let width = w.compute_dtype().size_in_bytes();
    let kept = plan.live_bytes_before(plan.backward_begins());
    let rest = plan.arena_bytes().saturating_sub(kept) + plan.workspace_bytes();
    let [b, t, d, h] = [w.batch_size, w.sequence_length, w.d_model, w.heads];
    let rest_name = "the rest of the arena: gradients, scratch";
    let mut terms = vec![
        Term::new(Weights, "weights", "4D^2", weights, 4),
        Term::new(Inputs, "x and its copy", "2BTD", 2.0 * x_elements, 4),
        Term::new(Inputs, "out's gradient", "BTD", x_elements, width),
        Term::new(
            Activations,
            "saved for backward",
            "of the arena",
            kept as f64,
            1,
        ),
        Term::new(Scratch, rest_name, "", rest as f64, 1),
    ];
    if device.is_cpu() {
        terms.extend(kernel_workspace(&plan));
    }
    Ok(MemoryBreakdown::new(
        format!("B {b}, T {t}, D {d}, H {h}"),
        terms,
    ))
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
    let rest = plan.arena_bytes().saturating_sub(in_arena) as f64;
    let workspace = plan.workspace_bytes() as f64;
    let rest_name = "unused at the peak";
    terms.push(Term::new(Scratch, rest_name, "of the arena", rest, 1));
    terms.push(Term::new(
        Scratch,
        "workspace",
        "outside the arena",
        workspace,
        1,
    ));
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
