//! The plan: calls and buffers, as data. It knows nothing of slices, storages or devices.

use super::arena;
use super::buffer::{Buffer, BufferId, Category, Location};
use super::costs::{self, PartCost};
use super::op::Op;
pub use super::op::{BufferRange, Call, Phase};
use crate::ops::lowering::Workspace;
use crate::optim::Moments;
use candle_core::DType;
use std::ops::Range;

/// Kernel calls, and the buffers that they read and write, each with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    calls: Vec<Call>,
    pub(super) parts: Vec<PartCost>,
    buffers: Vec<Buffer>,
    tables: Vec<Vec<f32>>,
    runs: Runs,
    arena_bytes: u64,
    workspace_bytes: u64,
}

/// Which calls are run how often.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Runs {
    /// In the first run alone: what they write is there in all others.
    pub first_run_only: Range<usize>,
    /// Once for each micro-batch.
    pub per_micro_batch: Range<usize>,
    pub micro_batches: usize,
}

impl Plan {
    /// Finds out how long each buffer lives, and gives each its place. The buffers `kept` are left for what reads
    /// them after the run. And the plan's number of each buffer that was handed over.
    pub(super) fn new(
        mut calls: Vec<Call>,
        parts: Vec<PartCost>,
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
            // What outlives a micro-batch must not lie where the next one works, nor what all of them read.
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
        let parts = costs::of_calls(parts, &mut calls);
        let (calls, numbers) = leave_out_unused(calls, &mut buffers);
        let arena_bytes = arena::place(&mut buffers);
        let plan = Self {
            calls,
            parts,
            buffers,
            tables,
            runs,
            arena_bytes,
            workspace_bytes: 0,
        };
        plan.check();
        (plan, numbers)
    }

    /// With what the executor takes beside the arena.
    pub(super) fn with_workspace(self, bytes: usize) -> Self {
        Self {
            workspace_bytes: bytes as u64,
            ..self
        }
    }

    /// With AdamW's running means stored like this; they are f32 in a plan that has met no optimizer yet.
    pub fn with_moments(mut self, moments: Moments) -> Self {
        self.set_moments(|_, parameter| moments.dtype(parameter));
        self
    }

    /// Says in what dtype each parameter's running means are, by its number and the dtype of the buffer so far.
    pub(super) fn set_moments(&mut self, dtype: impl Fn(usize, DType) -> DType) {
        for buffer in &mut self.buffers {
            if let Location::ExpAvg(number) | Location::ExpAvgSq(number) = buffer.location {
                buffer.dtype = dtype(number, buffer.dtype);
            }
        }
    }

    /// The kernel calls, in order.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Every buffer that a call touches.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The buffer with this id; `None` for an id of another plan, beyond this one's buffers.
    pub fn buffer(&self, id: BufferId) -> Option<&Buffer> {
        self.buffers.get(id.0)
    }

    /// The buffer of an operand of one of this plan's calls.
    pub(super) fn buffer_of(&self, operand: &BufferRange) -> &Buffer {
        &self.buffers[operand.buffer.0]
    }

    /// A table that was computed with the plan, by its number in [`Location::Table`]; `None` if there is no such table.
    pub fn table(&self, number: usize) -> Option<&[f32]> {
        self.tables.get(number).map(Vec::as_slice)
    }

    pub(super) fn tables(&self) -> &[Vec<f32>] {
        &self.tables
    }

    /// The calls that every micro-batch runs; those after it run once a step.
    pub fn per_micro_batch(&self) -> Range<usize> {
        self.runs.per_micro_batch.clone()
    }

    /// The calls that only the first run has, on a GPU: they make the copies of weights that products read, and every
    /// update renews them. See [`Step::refresh`](super::Step::refresh).
    pub fn first_run_only(&self) -> Range<usize> {
        self.runs.first_run_only.clone()
    }

    /// How many micro-batches a step has.
    pub fn micro_batches(&self) -> usize {
        self.runs.micro_batches
    }

    /// The size of the arena, in bytes: all that a run allocates, once, before the first, but for a GPU's
    /// [workspace](Self::workspace_bytes).
    ///
    /// Parameters and optimizer state are not in it; they are there already. [`total_bytes`](Self::total_bytes) has
    /// them.
    pub fn peak_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// What a GPU's executor works in beside the arena, in bytes: 32 MiB for cuBLASLt, the tables by which one launch
    /// updates many parameters (8 bytes for each 8,192 elements), and of a forward alone its output until that is
    /// copied. On the CPU none.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// The largest workspace of one kernel on the CPU, if any has one.
    pub(crate) fn kernel_workspace(&self) -> Option<Workspace> {
        let workspaces = self.calls.iter().filter_map(|call| {
            let first = call.reads.first();
            let dtype = first.map(|range| self.buffers[range.buffer.0].dtype);
            call.op.kernel()?.workspace(dtype)
        });
        workspaces.max_by(|a, b| a.bytes().total_cmp(&b.bytes()))
    }

    /// The arena, the workspace beside it, and the parameters, optimizer state, tables and outputs that the calls
    /// touch, in bytes.
    pub fn total_bytes(&self) -> u64 {
        let elsewhere = self.buffers.iter().filter(|buffer| !buffer.is_in_arena());
        self.arena_bytes + self.workspace_bytes + elsewhere.map(Buffer::bytes).sum::<u64>()
    }

    /// Bytes of all buffers of a category: of those in the arena, the most that are alive at one call.
    pub fn category_bytes(&self, category: Category) -> u64 {
        let buffers = || self.buffers.iter().filter(|b| b.category == category);
        let elsewhere = buffers().filter(|buffer| !buffer.is_in_arena());
        elsewhere.map(Buffer::bytes).sum::<u64>()
            + self.most_alive(|buffer| buffer.category == category)
    }

    /// The most bytes of arena buffers that are alive at one call: what no placement could go below.
    pub fn busiest_bytes(&self) -> u64 {
        self.most_alive(|_| true)
    }

    pub(crate) fn busiest_call(&self) -> usize {
        self.alive(|_| true)
            .max_by_key(|(_, bytes)| *bytes)
            .map_or(0, |(call, _)| call)
    }

    fn most_alive(&self, of: impl Fn(&Buffer) -> bool) -> u64 {
        self.alive(of).map(|(_, bytes)| bytes).max().unwrap_or(0)
    }

    fn alive(&self, of: impl Fn(&Buffer) -> bool) -> impl Iterator<Item = (usize, u64)> {
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

    /// FLOPs of all matrix products of a step.
    pub fn flops(&self) -> f64 {
        let times = |index: usize| self.times(index) as f64;
        let calls = self.calls.iter().enumerate();
        calls
            .map(|(index, call)| times(index) * call.op.flops())
            .sum()
    }

    /// Whether the call is one of this plan's, as far as its operands and its part can tell: both exist here.
    pub(super) fn has(&self, call: &Call) -> bool {
        let is_inside = |operand: &BufferRange| {
            let buffer = self.buffer(operand.buffer);
            buffer.is_some_and(|buffer| operand.elements.end <= buffer.elements())
        };
        call.operands().all(is_inside) && call.part.is_none_or(|part| part < self.parts.len())
    }

    /// The bytes of a call's operands; those that it reads and writes count twice. `None` for a call of another plan
    /// whose buffers this plan does not have.
    pub fn bytes_moved(&self, call: &Call) -> Option<u64> {
        let bytes = || self.bytes_read_and_written(call).iter().sum();
        self.has(call).then(bytes)
    }

    /// [`bytes_moved`](Self::bytes_moved), what is read and what is written.
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

    /// How often call number `index` is run in a step, the first apart; 0 if there is no such call.
    pub fn times(&self, index: usize) -> usize {
        match index {
            _ if index >= self.calls.len() => 0,
            _ if self.runs.first_run_only.contains(&index) => 0,
            _ if !self.runs.per_micro_batch.contains(&index) => 1,
            _ => (0..self.runs.micro_batches)
                .filter(|micro_batch| self.is_run_in(index, *micro_batch))
                .count(),
        }
    }

    /// Whether a micro-batch has call number `index`: of those that all have, weights come from other ranks in the
    /// first alone, and gradients are averaged in the last alone.
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

    /// bf16 or f16 if an operand of the call is in it, else f32. `None` for a call of another plan whose buffers this
    /// plan does not have.
    pub fn compute_dtype(&self, call: &Call) -> Option<DType> {
        self.has(call).then(|| self.dtype_of(call))
    }

    /// [`compute_dtype`](Self::compute_dtype) of one of this plan's calls.
    pub(super) fn dtype_of(&self, call: &Call) -> DType {
        let mut dtypes = call.operands().map(|operand| self.buffer_of(operand).dtype);
        let half = dtypes.find(|dtype| matches!(dtype, DType::BF16 | DType::F16));
        half.unwrap_or(DType::F32)
    }

    /// Bytes of what a run gives out.
    #[cfg(feature = "cuda")]
    pub(super) fn output_bytes(&self) -> u64 {
        self.at_location(Location::Output).map_or(0, Buffer::bytes)
    }

    /// How many parameters the calls touch.
    #[cfg(feature = "cuda")]
    pub(super) fn parameters(&self) -> usize {
        let homes = self.buffers.iter().map(|buffer| buffer.location);
        homes
            .filter(|location| matches!(location, Location::Parameter(_)))
            .count()
    }

    pub(super) fn at_location(&self, location: Location) -> Option<&Buffer> {
        let mut buffers = self.buffers.iter();
        buffers.find(|buffer| buffer.location == location)
    }

    /// What executors rely on: operands lie within their buffers, and what a call writes is no other operand of it.
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
    /// Bytes of the arena that are needed between call number `call` and the one before it: what earlier calls have
    /// written and this or a later one reads, or a run leaves behind.
    pub fn alive_bytes(&self, call: usize) -> u64 {
        let is_left = |end: usize| end == call && call == self.calls().len();
        let alive = self.buffers().iter().filter(|buffer| {
            let live = &buffer.live;
            buffer.is_in_arena() && live.start < call && (live.end > call || is_left(live.end))
        });
        alive.map(arena::taken_bytes).sum()
    }

    /// The first call of backward; the number of calls if there is none. Where head and loss are computed some rows at
    /// a time, the head's gradients come before it.
    pub fn backward_begins(&self) -> usize {
        let begins = self.first(Phase::Backward);
        let before = self.calls()[..begins].iter().rev();
        begins
            - before
                .take_while(|call| call.phase == Phase::LossGradient)
                .count()
    }

    /// The first call after backward; the number of calls if there is none.
    pub fn backward_ends(&self) -> usize {
        self.first(Phase::Clip)
    }

    /// The first call of this phase or a later one.
    fn first(&self, phase: Phase) -> usize {
        let found = self.calls().iter().position(|call| call.phase >= phase);
        found.unwrap_or(self.calls().len())
    }
}

/// Only the buffers that some call touches, the calls with their new numbers, and these numbers.
fn leave_out_unused(mut calls: Vec<Call>, buffers: &mut Vec<Buffer>) -> (Vec<Call>, Vec<BufferId>) {
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
