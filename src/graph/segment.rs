//! Segments of a trace: functions that backward recomputes.

use super::data::{CHECKPOINT, Node, TraceEvent, ValueId};
use super::hollow::{Role, hollow};
use super::record::record;
use super::session::with_session;
use super::steps::MemoryStep;
use super::target::Target;
use crate::ops::record::{By, Spec};
use crate::{Result, probe};
use candle_core::{DType, Shape, Tensor};

/// A segment's output, made from the inner function's: where its graph stands for it.
struct SegmentEnd {
    _inputs: Vec<Tensor>,
}

impl Spec for SegmentEnd {
    fn output(&self, inputs: &[probe::Operand<'_>]) -> (Shape, DType) {
        (inputs[0].dims.into(), inputs[0].dtype)
    }

    fn backward_steps(&self, _: &[probe::Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        Vec::new()
    }

    fn is_tracked(&self) -> bool {
        true // by the function's inputs and the weights that it reads
    }
}

/// `f(inputs)` as a segment: its inputs that have a graph are copied into leaves of its own.
pub(crate) fn checkpoint<const N: usize>(
    inputs: [&Tensor; N],
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    with_session(|session| {
        session.push(TraceEvent::Enter);
        Ok(())
    })?;
    let leaves = inputs.iter().map(|x| leaf(x)).collect::<Result<Vec<_>>>()?;
    let output = f(std::array::from_fn(|i| &leaves[i]))?.detach(); // and the graph goes
    let tracked = with_session(|session| {
        session.told_drops();
        let output = session.value(&output)?;
        for (leaf, input) in leaves.iter().zip(inputs) {
            let leaf = session.value(leaf)?;
            // A variable, behind which there is no op to be dropped.
            if leaf != session.value(input)? && leaf != output {
                session.push(TraceEvent::Drop(leaf));
            }
        }
        session.push(TraceEvent::Leave);
        Ok(session.graph.values[output.0].tracked)
    })?;
    if !tracked {
        return Ok(output);
    }
    let end = SegmentEnd {
        _inputs: inputs.map(Tensor::clone).into(),
    };
    record(CHECKPOINT, end, &[&output], By::Itself)
}

/// The variable that stands for the input `x` inside of a segment; one without a gradient is itself.
fn leaf(x: &Tensor) -> Result<Tensor> {
    with_session(|session| {
        let operand = session.operand(x)?;
        if !session.graph.values[operand.value.0].tracked || !x.dtype().is_float() {
            return Ok(x.detach());
        }
        let output = ValueId(session.graph.values.len());
        session.push(TraceEvent::Node(Node {
            path: probe::op_path(CHECKPOINT).to_string(),
            op: "copy",
            attributes: Vec::new(),
            composed: true,
            inputs: vec![operand],
            reads: Vec::new(),
            output,
            kept: Vec::new(),
            forward: vec![MemoryStep::Output],
            backward: Vec::new(),
        }));
        let leaf = hollow(x.shape(), x.dtype(), Role::Output, true)?;
        session.add_made(&leaf, true);
        Ok(leaf)
    })
}
