//! The CPU's executor: runs each call by its kernel.

mod call;
mod memory;

pub(super) use memory::ExternalBuffers;

use super::calls;
pub(super) use super::executor::Controls;
use super::op::BufferRange;
use super::phase_times::{PhaseClock, PhaseTimes};
use super::plan::Plan;
use crate::ops::cpu::for_stored;
use crate::{Result, ops};
use candle_core::{Device, Shape, Tensor, WithDType};
use memory::{Arena, BufferView};
use std::ops::ControlFlow;
use std::time::Instant;

/// The memory of a plan on the CPU.
#[derive(Debug, Default)]
pub(super) struct Executor {
    arena: Arena,
    clock: Option<PhaseClock<Instant>>,
}

impl Executor {
    pub fn new(plan: &Plan) -> Result<Self> {
        if let Some(in_half) = plan.multiplies_in_half() {
            ops::reserve_scratch(in_half)?;
        }
        Ok(Self::default())
    }

    pub fn take_arena(&mut self, plan: &Plan, from: &mut Self) -> Result<()> {
        self.arena = std::mem::take(&mut from.arena).of_at_least(plan.arena_bytes())?;
        Ok(())
    }

    pub fn run_micro_batches(
        &mut self,
        plan: &Plan,
        external: &ExternalBuffers<'_>,
        controls: &Controls<'_>,
    ) -> Result<()> {
        let view = BufferView::new(plan, &mut self.arena, external);
        let clock = &mut self.clock;
        if let Some(clock) = clock {
            clock.start();
        }
        let first = 0..plan.per_micro_batch().start;
        let _: ControlFlow<()> = run_calls(plan, first, &view, controls, clock)?;
        for micro_batch in 0..plan.micro_batches() {
            let view = view.of(micro_batch);
            let calls = plan.per_micro_batch();
            let _: ControlFlow<()> = run_calls(plan, calls, &view, controls, clock)?;
        }
        Ok(())
    }

    pub fn time_phases(&mut self, plan: &Plan, on: bool) {
        self.clock = on.then(|| PhaseClock::new(plan));
    }

    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        let ms = |from: &Instant, to: &Instant| Ok(to.duration_since(*from).as_secs_f64() * 1e3);
        self.clock
            .as_ref()
            .map_or(Ok(None), |clock| clock.times(ms))
    }

    /// Runs every call. Returns whether the update ran; it does not after an overflow. After an error neither
    /// parameters nor optimizer state have changed. (An update in backward is an exception, but nothing can fail after
    /// it.)
    pub fn run(
        &mut self,
        plan: &Plan,
        external: &ExternalBuffers<'_>,
        controls: &Controls<'_>,
    ) -> Result<bool> {
        self.run_micro_batches(plan, external, controls)?;
        self.run_after_micro_batches(plan, external, controls)
    }

    /// Runs the calls after the micro-batches. Returns the same as [`run`](Self::run).
    fn run_after_micro_batches(
        &mut self,
        plan: &Plan,
        external: &ExternalBuffers<'_>,
        controls: &Controls<'_>,
    ) -> Result<bool> {
        let view = BufferView::new(plan, &mut self.arena, external);
        let rest = plan.per_micro_batch().end..plan.calls().len();
        Ok(run_calls(plan, rest, &view, controls, &mut self.clock)?.is_continue())
    }

    pub fn read<T: WithDType>(&self, plan: &Plan, operand: &BufferRange) -> Vec<T> {
        self.arena.values(plan, operand).to_vec()
    }

    pub fn copy(
        &self,
        plan: &Plan,
        operand: &BufferRange,
        shape: &Shape,
    ) -> candle_core::Result<Tensor> {
        for_stored!(plan.buffer_of(operand).dtype, T => {
            Tensor::from_slice(self.arena.values::<T>(plan, operand), shape, &Device::Cpu)
        })
    }
}

fn run_calls(
    plan: &Plan,
    calls: std::ops::Range<usize>,
    view: &BufferView<'_>,
    controls: &Controls<'_>,
    clock: &mut Option<PhaseClock<Instant>>,
) -> Result<ControlFlow<()>> {
    let Some(clock) = clock else {
        return run_piece(plan, calls, view, controls);
    };
    for piece in clock.parts.pieces(calls) {
        clock.begins(piece.start, Instant::now());
        let next = run_piece(plan, piece, view, controls)?;
        if next.is_break() {
            clock.ends(Instant::now());
            return Ok(next);
        }
    }
    clock.ends(Instant::now());
    Ok(ControlFlow::Continue(()))
}

fn run_piece(
    plan: &Plan,
    calls: std::ops::Range<usize>,
    view: &BufferView<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    calls::run(plan, calls, view.micro_batch(), |_, call| {
        let slices = view.slices(call, controls.loss_gradient());
        call::run(plan, &call.op, &slices, controls)
    })
}
