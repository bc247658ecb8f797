//! A plan that is being written: calls in order, and the buffers that they read and write.

use super::buffer::{BufferId, Buffers, Category};
use super::costs::PartCost;
use super::op::Op;
use super::plan::{BufferRange, Call, Phase};
use crate::ops::lowering::Named;
use crate::probe::Path;
use candle_core::DType;

/// Calls and buffers so far.
#[derive(Default)]
pub(super) struct Writer {
    pub calls: Vec<Call>,
    pub buffers: Buffers,
    /// What what runs the plan reads after a run.
    pub kept: Vec<BufferId>,
    /// Of the calls to come.
    pub phase: Phase,
    /// Where in the model they are.
    pub path: String,
    /// The outermost module there.
    pub module: Path,
    /// Which of the parts they belong to.
    pub part: Option<usize>,
    /// So far.
    pub parts: Vec<PartCost>,
}

impl Writer {
    /// A new buffer of the arena, named after the place that it is made at.
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

    /// All of a buffer.
    pub fn whole(&self, id: BufferId) -> BufferRange {
        BufferRange::whole(&self.buffers, id)
    }

    /// A call.
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
            part: self.part,
            reads: reads.into(),
            writes: writes.into(),
        });
    }
}
