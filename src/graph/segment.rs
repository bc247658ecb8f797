//! Segments of a trace: functions that backward recomputes.

use super::data::{CHECKPOINT, LEAF, Node, TraceEvent, ValueId};
use super::hollow::{Role, hollow};
use super::record::{Call, record};
use super::session::with_session;
use crate::{Result, probe};
use candle_core::Tensor;
use std::sync::Arc;

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
    // Made from the inner function's output: where its graph stands for it.
    record(Call {
        name: CHECKPOINT,
        attributes: Vec::new(),
        composed: false,
        inputs: &[&output],
        reads: &[],
        output: (output.shape().clone(), output.dtype()),
        kept: Vec::new(),
        is_tracked: true, // by the function's inputs and the weights that it reads
        held: Arc::new(inputs.map(Tensor::clone)),
    })
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
            module: probe::current().outermost(),
            op: LEAF,
            attributes: Vec::new(),
            composed: true,
            inputs: vec![operand],
            reads: Vec::new(),
            output,
            kept: Vec::new(),
        }));
        let leaf = hollow(x.shape(), x.dtype(), Role::Output, true)?;
        session.add_made(&leaf, true);
        Ok(leaf)
    })
}
