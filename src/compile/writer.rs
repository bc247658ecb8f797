//! The writer of a plan: it collects calls and buffers.

use super::buffer::{BufferId, Buffers, Category};
use super::costs::GroupCost;
use super::op::Op;
use super::op::{BufferRange, Call, Phase};
use crate::ops::lowering::Named;
use crate::probe::Path;
use candle_core::DType;

#[derive(Default)]
pub(super) struct Writer {
    pub calls: Vec<Call>,
    pub buffers: Buffers,
    /// Buffers that are read after a run.
    pub kept: Vec<BufferId>,
    /// The phase of the calls to be added.
    pub phase: Phase,
    /// The path of the calls to be added.
    pub path: String,
    /// The outermost module of the path.
    pub module: Path,
    /// The index in `group_costs` of the calls to be added.
    pub cost_index: Option<usize>,
    pub group_costs: Vec<GroupCost>,
}

impl Writer {
    /// Adds an arena buffer, named after the current path.
    pub fn arena(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        category: Category,
    ) -> BufferId {
        let name = match self.path.is_empty() {
            true => name.to_string(),
            false => format!("{}/{name}", self.path),
        };
        self.buffers.arena(&name, shape, dtype, category)
    }

    pub fn whole(&self, id: BufferId) -> BufferRange {
        BufferRange::whole(&self.buffers, id)
    }

    pub fn call(
        &mut self,
        op: impl Into<Op>,
        reads: impl Into<Named<BufferRange>>,
        writes: impl Into<Named<BufferRange>>,
    ) {
        self.calls.push(Call {
            op: op.into(),
            path: self.path.clone(),
            module: self.module,
            phase: self.phase,
            cost_index: self.cost_index,
            reads: reads.into(),
            writes: writes.into(),
        });
    }
}
