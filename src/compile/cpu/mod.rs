//! The CPU's executor: a loop over a plan's calls, each handed to its kernel.
//!
//! What lives here: memory ([`memory`]) and, op by op, from operands ([`operands`]) to [`crate::kernels::cpu`] ([`call`],
//! [`attention`], [`update`]). What does not: anything that knows a model.

mod attention;
mod call;
mod memory;
mod operands;
mod update;

pub(super) use memory::Lent;

use super::op::Op;
use super::plan::{Call, Operand, Phase, Plan};
use crate::Result;
use crate::kernels::cpu::adamw::Update;
use crate::kernels::cpu::gemm;
use crate::probe::{self, Kind};
use candle_core::{DType, WithDType};
use memory::{Arena, View};
use std::ops::ControlFlow;

/// What may change from run to run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Controls<'a> {
    /// By parameter.
    pub updates: &'a [Update],
    /// The norm that gradients are clipped to, where the plan clips.
    pub clip_norm: f64,
    /// What the loss's gradient begins with, to be undone where the plan unscales; `None` for 1, and for no check either.
    pub loss_scale: Option<f64>,
}

/// A plan's memory, and the loop.
#[derive(Debug)]
pub(super) struct Executor {
    arena: Arena,
}

impl Executor {
    /// Allocates the arena, and what threads pack products into.
    pub fn new(plan: &Plan) -> Result<Self> {
        let rounds = |call: &Call| plan.lower_dtype(call) != DType::F32;
        gemm::reserve_scratch(plan.calls().iter().any(rounds));
        Ok(Self {
            arena: Arena::new(plan.peak_bytes())?,
        })
    }

    /// Runs the calls of every micro-batch, and those before: all but the update.
    pub fn run_micro_batches(
        &mut self,
        plan: &Plan,
        lent: &Lent<'_>,
        controls: &Controls<'_>,
    ) -> Result<()> {
        let view = View::new(plan, &mut self.arena, lent);
        let _: ControlFlow<()> = run_calls(plan, 0..plan.repeated().start, &view, controls)?;
        for micro_batch in 0..plan.micro_batches() {
            let view = view.of(micro_batch);
            let _: ControlFlow<()> = run_calls(plan, plan.repeated(), &view, controls)?;
        }
        Ok(())
    }

    /// Runs every call: whether the update was among them, or an overflow has ended the step before. After an error neither
    /// parameters nor optimizer state have changed (an update in backward apart, which nothing can fail after).
    pub fn run(&mut self, plan: &Plan, lent: &Lent<'_>, controls: &Controls<'_>) -> Result<bool> {
        self.run_micro_batches(plan, lent, controls)?;
        self.run_after_micro_batches(plan, lent, controls)
    }

    /// Runs the calls that follow those of the micro-batches; what it returns is [`run`](Self::run)'s.
    pub fn run_after_micro_batches(
        &mut self,
        plan: &Plan,
        lent: &Lent<'_>,
        controls: &Controls<'_>,
    ) -> Result<bool> {
        let view = View::new(plan, &mut self.arena, lent);
        let rest = plan.repeated().end..plan.calls().len();
        Ok(run_calls(plan, rest, &view, controls)?.is_continue())
    }

    /// What a run has left in an operand that the plan keeps, where it lies.
    pub fn values<T: WithDType>(&self, plan: &Plan, operand: &Operand) -> &[T] {
        self.arena.values(plan, operand)
    }

    /// What a run has left in an operand that the plan keeps.
    pub fn read<T: WithDType>(&mut self, plan: &Plan, operand: &Operand) -> Vec<T> {
        self.values::<T>(plan, operand).to_vec()
    }
}

fn run_calls(
    plan: &Plan,
    calls: std::ops::Range<usize>,
    view: &View<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    let mut phase: Option<(Phase, probe::Guard)> = None;
    for call in &plan.calls()[calls] {
        let next = if probe::is_listening() {
            if phase.as_ref().is_none_or(|(name, _)| *name != call.phase) {
                drop(phase.take()); // ended before the next begins
                phase = Some((call.phase, probe::phase(probed_phase(call.phase))));
            }
            run_probed(plan, call, view, controls)?
        } else {
            call::run(plan, call, view, controls)?
        };
        if next.is_break() {
            return Ok(next);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Runs a call in an op's range at its place in the model. What is backward is said by the phase: each call is an op of its
/// own, and costs what it costs.
fn run_probed(
    plan: &Plan,
    call: &Call,
    view: &View<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    let name = call.op.name();
    let places = call.path.split('/');
    let path = places.fold(probe::current(), |path, place| path.child(place));
    let range = probe::op(Kind::Op, name, path.child(name));
    let next = call::run(plan, call, view, controls)?;
    let dtype = plan.buffer(call.writes[0].buffer).dtype;
    match call.op {
        Op::Matmul {
            rows, cols, depth, ..
        } => {
            let [a, b, c] = [[rows, depth], [depth, cols], [rows, cols]];
            let operand = |dims, dtype| probe::Operand { dims, dtype };
            let factors = plan.lower_dtype(call);
            range.leave(probe::Operands {
                inputs: &[operand(&a, factors), operand(&b, factors)],
                output: operand(&c, dtype),
            });
        }
        Op::AdamW { elements, .. } => range.leave_flat(elements, dtype),
        _ => {} // what the costs of eager ops do not describe
    }
    Ok(next)
}

/// The phases that profiles know: loss belongs to forward, as in an eager step, though here its gradient comes with it.
fn probed_phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward | Phase::Loss => "forward",
        Phase::Backward => "backward",
        Phase::Clip | Phase::Optimizer => "optimizer",
    }
}
