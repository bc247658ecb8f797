//! The plan: calls and buffers as plain data, independent of slices, storages and devices.

use super::arena;
use super::buffer::{Buffer, BufferId, Category, Location};
use super::costs::{self, GroupCost};
use super::op::{BufferRange, Call, Op, Phase};
use crate::kernels::cpu::gemm;
use crate::ops::lowering::Workspace;
use crate::probe;
use candle_core::DType;
use std::ops::Range;

/// A list of kernel calls, and the buffers that they read and write, each with its location.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    calls: Vec<Call>,
    pub(super) group_costs: Vec<GroupCost>,
    buffers: Vec<Buffer>,
    tables: Vec<Vec<f32>>,
    runs: Runs,
    arena_bytes: u64,
    workspace_bytes: u64,
}

/// The ranges of calls by how often they run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Runs {
    /// Calls that only the first run executes. Later runs reuse their results.
    pub first_run_only: Range<usize>,
    /// Calls that run once per micro-batch.
    pub per_micro_batch: Range<usize>,
    pub micro_batches: usize,
}

impl Plan {
    /// Determines each buffer's lifetime and location. Buffers in `kept` stay alive to the end of the run. Returns the
    /// plan and the new id of each buffer.
    pub(super) fn new(
        mut calls: Vec<Call>,
        group_costs: Vec<GroupCost>,
        mut buffers: Vec<Buffer>,
        tables: Vec<Vec<f32>>,
        runs: Runs,
        kept: &[BufferId],
    ) -> (Self, Vec<BufferId>) {
        for (index, call) in calls.iter().enumerate() {
            for operand in call.operands() {
                let live = &mut buffers[operand.buffer.0].live;
                *live = match Range::is_empty(live) {
                    true => index..index + 1,
                    false => live.start..index + 1,
                };
            }
        }
        for id in kept {
            buffers[id.0].live.end = calls.len();
        }
        for call in &calls[runs.first_run_only.clone()] {
            for operand in call.writes.iter() {
                buffers[operand.buffer.0].live = 0..calls.len();
            }
        }
        let per_micro_batch = &runs.per_micro_batch;
        if runs.micro_batches > 1 {
            // A buffer that outlives a micro-batch, or that all micro-batches read, must not share memory with their
            // buffers.
            for (number, buffer) in buffers.iter_mut().enumerate() {
                let live = &mut buffer.live;
                if Range::is_empty(live) {
                    continue;
                }
                let is_kept = kept.iter().any(|id| id.0 == number);
                let (before, after) = (
                    live.start < per_micro_batch.start,
                    live.end > per_micro_batch.end || is_kept,
                );
                if after && live.start < per_micro_batch.end {
                    live.start = live.start.min(per_micro_batch.start);
                }
                if before && live.end > per_micro_batch.start {
                    live.end = live.end.max(per_micro_batch.end);
                }
            }
        }
        for buffer in &mut buffers {
            let mut phases = buffer.live.clone().map(|call| calls[call].phase);
            let forward =
                buffer.live.start < calls.len() && calls[buffer.live.start].phase == Phase::Forward;
            let last = phases.next_back();
            if buffer.category == Category::Temporary && forward && last == Some(Phase::Backward) {
                buffer.category = Category::Activation;
            }
        }
        let group_costs = costs::remove_unused_groups(group_costs, &mut calls);
        let (calls, numbers) = remove_unused_buffers(calls, &mut buffers);
        let arena_bytes = arena::place(&mut buffers);
        let plan = Self {
            calls,
            group_costs,
            buffers,
            tables,
            runs,
            arena_bytes,
            workspace_bytes: 0,
        };
        plan.check();
        (plan, numbers)
    }

    /// Sets the size of the executor's memory outside of the arena.
    pub(super) fn with_workspace(self, bytes: usize) -> Self {
        Self {
            workspace_bytes: bytes as u64,
            ..self
        }
    }

    /// Sets the dtypes of the optimizer's state. `dtype` is called with the indices of the parameter and of the tensor.
    pub(super) fn set_state_dtypes(&mut self, dtype: impl Fn(usize, usize) -> Option<DType>) {
        for buffer in &mut self.buffers {
            if let Location::State { parameter, index } = buffer.location
                && let Some(dtype) = dtype(parameter, index)
            {
                buffer.dtype = dtype;
            }
        }
    }

    /// Returns the calls, in order.
    #[doc(hidden)]
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Returns the buffers that calls access.
    #[doc(hidden)]
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Returns the buffer with this id, or `None` if the id is out of range.
    #[doc(hidden)]
    pub fn buffer(&self, id: BufferId) -> Option<&Buffer> {
        self.buffers.get(id.0)
    }

    pub(super) fn buffer_of(&self, operand: &BufferRange) -> &Buffer {
        &self.buffers[operand.buffer.0]
    }

    /// Returns the table with this index in [`Location::Table`], or `None` if the index is out of range.
    #[doc(hidden)]
    pub fn table(&self, number: usize) -> Option<&[f32]> {
        self.tables.get(number).map(Vec::as_slice)
    }

    pub(super) fn tables(&self) -> &[Vec<f32>] {
        &self.tables
    }

    /// Returns the calls that every micro-batch runs. Calls after them run once per step.
    #[doc(hidden)]
    pub fn per_micro_batch(&self) -> Range<usize> {
        self.runs.per_micro_batch.clone()
    }

    /// Returns the calls that only the first run executes. On a GPU they make the copies of weights that matmuls read;
    /// every update renews these. See [`Step::refresh`](super::Step::refresh).
    #[doc(hidden)]
    pub fn first_run_only(&self) -> Range<usize> {
        self.runs.first_run_only.clone()
    }

    /// Returns the number of micro-batches per step.
    pub fn micro_batches(&self) -> usize {
        self.runs.micro_batches
    }

    /// Returns the size of the arena, in bytes. It is allocated once, before the first run, and holds every tensor that
    /// a run computes. [`compile`](crate::compile#what-a-plan-is-exact-about) lists the memory that a run needs outside
    /// of it.
    ///
    /// Parameters and optimizer state already exist and are not included; [`total_bytes`](Self::total_bytes) includes
    /// them.
    pub fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Returns the size of a GPU executor's memory outside of the arena, in bytes: 32 MiB for cuBLASLt, the tables with
    /// which one launch updates many parameters (8 bytes for each 8,192 elements), and, in a plan of a forward pass, a
    /// buffer for the output, which is then copied to the caller. 0 on the CPU.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Returns the scratch memory that kernels need on the CPU in addition to [`total_bytes`](Self::total_bytes), in
    /// bytes; 0 in a plan for a GPU.
    ///
    /// It is the sum of the buffers that threads keep for matmuls, and of the largest workspace that one kernel needs,
    /// such as attention's. The threads are the calling one and those of the current rayon pool; the buffers of the
    /// `gemm` crate are included whether the plan has matmuls for it or not. Other temporaries were under 1 MiB in
    /// tests.
    pub fn scratch_bytes(&self) -> u64 {
        if self.workspace_bytes > 0 {
            return 0; // a GPU has cuBLASLt's
        }
        let of_threads = self.multiplies_in_half().map_or(0, gemm::scratch_bytes);
        let workspace = self.kernel_workspace().map_or(0.0, |own| own.bytes());
        (of_threads as u64).saturating_add(workspace as u64)
    }

    /// Returns the largest workspace that one kernel needs on the CPU, if any needs one.
    pub(crate) fn kernel_workspace(&self) -> Option<Workspace> {
        let workspaces = self.calls.iter().filter_map(|call| {
            let first = call.reads.first();
            let dtype = first.map(|range| self.buffers[range.buffer.0].dtype);
            call.op.kernel()?.workspace(dtype)
        });
        workspaces.max_by(|a, b| a.bytes().total_cmp(&b.bytes()))
    }

    /// Returns the peak memory of a run in bytes: the arena, the parameters, the optimizer's state, inputs, frozen
    /// weights, constants, tables of rotary embeddings, outputs, and a GPU's [workspace](Self::workspace_bytes). [Not
    /// included](crate::compile#what-a-plan-is-exact-about) are the [scratch memory](Self::scratch_bytes) of kernels on
    /// the CPU and, on a GPU, what CUDA and NCCL allocate themselves.
    pub fn total_bytes(&self) -> u64 {
        let elsewhere = self.buffers.iter().filter(|buffer| !buffer.is_in_arena());
        self.arena_bytes + self.workspace_bytes + elsewhere.map(Buffer::bytes).sum::<u64>()
    }

    /// Returns the bytes of all buffers of a category. For buffers in the arena this is the most that is live at any
    /// one call, so categories do not add up to the total.
    #[doc(hidden)]
    pub fn category_bytes(&self, category: Category) -> u64 {
        let buffers = || self.buffers.iter().filter(|b| b.category == category);
        let elsewhere = buffers().filter(|buffer| !buffer.is_in_arena());
        elsewhere.map(Buffer::bytes).sum::<u64>()
            + self.max_live(|buffer| buffer.category == category)
    }

    /// Returns the maximum of arena bytes that are live at one call: a lower bound for any placement.
    #[doc(hidden)]
    pub fn max_live_bytes(&self) -> u64 {
        self.max_live(|_| true)
    }

    pub(crate) fn max_live_call(&self) -> usize {
        self.live_by_call(|_| true)
            .max_by_key(|(_, bytes)| *bytes)
            .map_or(0, |(call, _)| call)
    }

    fn max_live(&self, of: impl Fn(&Buffer) -> bool) -> u64 {
        self.live_by_call(of)
            .map(|(_, bytes)| bytes)
            .max()
            .unwrap_or(0)
    }

    fn live_by_call(&self, of: impl Fn(&Buffer) -> bool) -> impl Iterator<Item = (usize, u64)> {
        let mut change = vec![0i64; self.calls.len() + 1];
        for buffer in self.buffers.iter().filter(|b| b.is_in_arena() && of(b)) {
            let bytes = arena::taken_bytes(buffer) as i64;
            change[buffer.live.start] += bytes;
            change[buffer.live.end] -= bytes;
        }
        let alive = change.into_iter().scan(0, |alive, change| {
            *alive += change;
            Some(*alive as u64)
        });
        alive.enumerate()
    }

    /// Returns the FLOPs of all matmuls of a step.
    pub fn flops(&self) -> f64 {
        let times = |index: usize| self.runs_per_step(index) as f64;
        let calls = self.calls.iter().enumerate();
        calls
            .map(|(index, call)| times(index) * call.op.flops())
            .sum()
    }

    /// Returns whether a call's operands and cost index exist in this plan.
    pub(super) fn has(&self, call: &Call) -> bool {
        let is_inside = |operand: &BufferRange| {
            let buffer = self.buffer(operand.buffer);
            buffer.is_some_and(|buffer| operand.elements.end <= buffer.elements())
        };
        call.operands().all(is_inside)
            && call
                .cost_index
                .is_none_or(|index| index < self.group_costs.len())
    }

    /// Returns the bytes of a call's operands, or `None` for a call of another plan. Operands
    /// that are read and written count twice.
    #[doc(hidden)]
    pub fn bytes_moved(&self, call: &Call) -> Option<u64> {
        let bytes = || self.bytes_read_and_written(call).iter().sum();
        self.has(call).then(bytes)
    }

    /// Returns the bytes of the operands of all calls of a step: what its kernels read and write.
    pub fn traffic_bytes(&self) -> f64 {
        let calls = self.calls.iter().enumerate();
        calls
            .map(|(index, call)| {
                let bytes: u64 = self.bytes_read_and_written(call).iter().sum();
                self.runs_per_step(index) as f64 * bytes as f64
            })
            .sum()
    }

    /// Returns the bytes that a call reads and the bytes that it writes; see [`bytes_moved`](Self::bytes_moved).
    pub(super) fn bytes_read_and_written(&self, call: &Call) -> [u64; 2] {
        let bytes = |operand: &BufferRange| {
            let width = self.buffer_of(operand).dtype.size_in_bytes();
            (operand.elements.len() * width) as u64
        };
        let written: u64 = call.writes.iter().map(bytes).sum();
        let read_back = if call.op.reads_what_it_writes() {
            written
        } else {
            0
        };
        [
            call.reads.iter().map(bytes).sum::<u64>() + read_back,
            written,
        ]
    }

    /// Returns how often a step runs the call with this index, the first step excepted; 0 if the index is out of range.
    #[doc(hidden)]
    pub fn runs_per_step(&self, index: usize) -> usize {
        match index {
            _ if index >= self.calls.len() => 0,
            _ if self.runs.first_run_only.contains(&index) => 0,
            _ if !self.runs.per_micro_batch.contains(&index) => 1,
            _ => (0..self.runs.micro_batches)
                .filter(|micro_batch| self.is_run_in(index, *micro_batch))
                .count(),
        }
    }

    /// Returns whether a micro-batch runs the call with this index. Among calls per micro-batch, only the first
    /// micro-batch receives weights from other ranks, and only the last averages gradients.
    pub(super) fn is_run_in(&self, index: usize, micro_batch: usize) -> bool {
        let is_of_all = self.runs.per_micro_batch.contains(&index);
        match self.calls[index].op {
            Op::AllReduce { .. } | Op::Reduce { .. } if is_of_all => {
                micro_batch + 1 == self.runs.micro_batches
            }
            Op::Broadcast { .. } if is_of_all => micro_batch == 0,
            _ => true,
        }
    }

    /// Returns the dtype in which a call multiplies: bf16 or f16 if an operand has it, f64 if all floats have it, else
    /// f32. `None` for a call of another plan.
    #[doc(hidden)]
    pub fn compute_dtype(&self, call: &Call) -> Option<DType> {
        self.has(call).then(|| self.dtype_of(call))
    }

    /// Same as [`compute_dtype`](Self::compute_dtype), for a call of this plan.
    pub(super) fn dtype_of(&self, call: &Call) -> DType {
        probe::compute_dtype(call.operands().map(|operand| self.buffer_of(operand).dtype))
    }

    /// Returns whether a matmul of the plan is in half precision; `None` if there is no matmul.
    pub(super) fn multiplies_in_half(&self) -> Option<bool> {
        let multiplies = |op: &Op| op.is_matmul() || matches!(op, Op::Orthogonalize { .. });
        let matmuls = self.calls.iter().filter(|call| multiplies(&call.op));
        let half = matmuls.map(|call| matches!(self.dtype_of(call), DType::BF16 | DType::F16));
        half.reduce(|a, b| a || b)
    }

    /// Returns the gradients that are unscaled or whose squares are summed before the update, in order.
    pub(super) fn checked_gradients(&self) -> impl Iterator<Item = &BufferRange> {
        let is_unscaled = |call: &Call| matches!(call.op, Op::Unscale { .. });
        let unscaled = self.calls.iter().any(is_unscaled);
        self.calls.iter().filter_map(move |call| match call.op {
            Op::Unscale { .. } => Some(call.writes.operand("gradient")),
            Op::SumOfSquares { .. } if !unscaled => Some(call.reads.operand("x")),
            _ => None,
        })
    }

    /// Returns the size of a run's output tensor, in bytes.
    #[cfg(feature = "cuda")]
    pub(super) fn output_bytes(&self) -> u64 {
        self.at_location(Location::Output).map_or(0, Buffer::bytes)
    }

    /// Returns the number of parameters that calls access.
    #[cfg(feature = "cuda")]
    pub(super) fn parameters(&self) -> usize {
        let locations = self.buffers.iter().map(|buffer| buffer.location);
        locations
            .filter(|location| matches!(location, Location::Parameter(_)))
            .count()
    }

    pub(super) fn at_location(&self, location: Location) -> Option<&Buffer> {
        let mut buffers = self.buffers.iter();
        buffers.find(|buffer| buffer.location == location)
    }

    /// Checks what executors rely on: operands are within their buffers, and an operand that a call writes overlaps no
    /// other operand of the call.
    fn check(&self) {
        for call in &self.calls {
            for operand in call.operands() {
                let buffer = self.buffer_of(operand);
                assert!(
                    operand.elements.end <= buffer.elements(),
                    "{call:?}: {}",
                    buffer.name
                );
            }
            for (i, written) in call.writes.iter().enumerate() {
                let others = call.reads.iter().chain(call.writes.iter().take(i));
                for other in others {
                    let share = written.buffer == other.buffer
                        && written.elements.start < other.elements.end
                        && other.elements.start < written.elements.end;
                    assert!(!share, "{call:?}: {}", self.buffer_of(written).name);
                }
            }
        }
    }
}

impl Plan {
    /// Returns the bytes of the arena that are live between the call with this index and the one before it: written by
    /// earlier calls, and read by this or later ones or left by the run.
    pub(crate) fn live_bytes_before(&self, call: usize) -> u64 {
        let is_left = |end: usize| end == call && call == self.calls().len();
        let alive = self.buffers().iter().filter(|buffer| {
            let live = &buffer.live;
            buffer.is_in_arena() && live.start < call && (live.end > call || is_left(live.end))
        });
        alive.map(arena::taken_bytes).sum()
    }

    /// Returns the index of the first call of backward, or the number of calls if there is none. If head and loss run
    /// on some rows at a time, the head's gradients come before it.
    pub(crate) fn backward_begins(&self) -> usize {
        let begins = self.first(Phase::Backward);
        let before = self.calls()[..begins].iter().rev();
        begins
            - before
                .take_while(|call| call.phase == Phase::LossGradient)
                .count()
    }

    /// Returns the index of the first call after backward, or the number of calls if there is none.
    pub(crate) fn backward_ends(&self) -> usize {
        self.first(Phase::Clip)
    }

    /// Returns the index of the first call of this phase or a later one.
    fn first(&self, phase: Phase) -> usize {
        let found = self.calls().iter().position(|call| call.phase >= phase);
        found.unwrap_or(self.calls().len())
    }
}

/// Removes the buffers that no call accesses. Returns the renumbered calls and each buffer's new id.
fn remove_unused_buffers(
    mut calls: Vec<Call>,
    buffers: &mut Vec<Buffer>,
) -> (Vec<Call>, Vec<BufferId>) {
    let mut numbers = Vec::with_capacity(buffers.len());
    let mut used = 0;
    for buffer in buffers.iter() {
        numbers.push(BufferId(used));
        used += usize::from(!buffer.live.is_empty());
    }
    buffers.retain(|buffer| !buffer.live.is_empty());
    for call in &mut calls {
        for operand in call.reads.iter_mut().chain(call.writes.iter_mut()) {
            operand.buffer = numbers[operand.buffer.0];
        }
    }
    (calls, numbers)
}
