//! Recording of op calls and of checkpointed segments in the open trace.

use super::data::{Attribute, CHECKPOINT, LEAF, Node, Saved, TraceEvent, ValueId};
use super::meta::{Role, empty, make_meta, meta_tensor};
use super::session::{note_drop, with_session};
use crate::grad::is_grad_enabled;
use crate::{Result, probe};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// An op call to be recorded.
pub(crate) struct Call<'a> {
    pub name: &'static str,
    pub attributes: Vec<(&'static str, Attribute)>,
    pub composed: bool,
    pub inputs: &'a [&'a Tensor],
    /// Extra inputs, which receive no gradient.
    pub extra_inputs: &'a [Tensor],
    pub output: (Shape, DType),
    /// The name, shape and dtype of each tensor saved for backward.
    pub saved: Vec<(&'static str, Shape, DType)>,
    /// Whether a gradient reaches the output although the inputs are detached.
    pub is_tracked: bool,
    /// Tensors that the op's backward holds, kept alive as long as the output has a graph.
    pub held: Arc<dyn Any + Send + Sync>,
}

/// Records a call and returns its output as a meta tensor.
pub(crate) fn record(call: Call<'_>) -> Result<Tensor> {
    let path = probe::op_path(call.name).to_string();
    let module = probe::current().outermost();
    with_session(|session| {
        session.record_drops(); // before the operands: an operand that is read now is alive
        let inputs = call.inputs.iter().map(|x| session.operand(x));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let reads = call.extra_inputs.iter().map(|x| session.operand(x));
        let reads = reads.collect::<Result<Vec<_>>>()?;
        // Checked in the value table too: a meta output has a node of candle's even where a real one has none.
        let tracked =
            call.is_tracked || is_grad_enabled() && inputs.iter().any(|operand| operand.tracked);
        let output = ValueId(session.graph.values.len());
        let saved = call
            .saved
            .iter()
            .enumerate()
            .map(|(i, (name, _, _))| Saved {
                name,
                value: ValueId(output.0 + 1 + i),
            });
        session.push(TraceEvent::Node(Node {
            path,
            module,
            op: call.name,
            attributes: call.attributes,
            composed: call.composed,
            inputs,
            extra_inputs: reads,
            output,
            saved: saved.collect(),
        }));
        let (shape, dtype) = call.output;
        // Without a graph, nothing outlives the call.
        let keeps = tracked.then(|| {
            let inputs: Vec<Tensor> = call.inputs.iter().map(|x| (*x).clone()).collect();
            (call.held, inputs)
        });
        let y = MetaOp {
            name: call.name,
            shape,
            dtype,
            trace: session.id,
            value: output,
            _keeps: keeps,
        }
        .tensor()?;
        session.add_made(&y, tracked);
        for (_, shape, dtype) in call.saved {
            let saved = meta_tensor(shape, dtype, Role::Output, false)?;
            session.add_made(&saved, false);
        }
        Ok(y)
    })
}

/// Returns the tensor that the op of output `y` saved for backward as `name`.
pub(crate) fn saved_value(y: &Tensor, name: &str) -> Result<Option<Tensor>> {
    with_session(|session| {
        let value = session.value(y)?;
        let mut latest = session.graph.events.iter().rev();
        let node = latest.find_map(|event| match event {
            TraceEvent::Node(node) if node.output == value => Some(node),
            _ => None,
        });
        let saved = node.and_then(|node| node.saved.iter().find(|saved| saved.name == name));
        Ok(saved.map(|saved| session.held[saved.value.0].clone()))
    })
}

/// The candle op of a meta output. candle's graph holds it like a real op and drops it with the last tensor, which
/// records the drop.
struct MetaOp {
    name: &'static str,
    shape: Shape,
    dtype: DType,
    trace: u64,
    value: ValueId,
    /// Kept alive with it: what the op's backward holds, and the inputs that backward would read.
    _keeps: Option<(Arc<dyn Any + Send + Sync>, Vec<Tensor>)>,
}

impl Drop for MetaOp {
    fn drop(&mut self) {
        note_drop(self.trace, self.value);
    }
}

impl CustomOp1 for MetaOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((empty(self.dtype)?, self.shape.clone()))
    }
}

impl MetaOp {
    /// Returns the meta tensor whose op this is. candle keeps a tensor's op only if an argument is tracked, so each op
    /// gets a variable that nothing else shares.
    fn tensor(self) -> candle_core::Result<Tensor> {
        let tracked = Var::zeros((), DType::F32, &Device::Cpu)?;
        let x = tracked.apply_op1(self)?;
        make_meta(&x, Role::Output)?;
        Ok(x)
    }
}

/// Runs `f(inputs)` as a checkpointed segment. Inputs that have a graph are copied into leaf variables first.
pub(crate) fn checkpoint<const N: usize>(
    inputs: [&Tensor; N],
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    with_session(|session| {
        session.push(TraceEvent::Enter);
        Ok(())
    })?;
    let leaves = inputs.iter().map(|x| leaf(x)).collect::<Result<Vec<_>>>()?;
    let output = f(std::array::from_fn(|i| &leaves[i]))?.detach(); // the segment's graph is freed
    let tracked = with_session(|session| {
        session.record_drops();
        let output = session.value(&output)?;
        for (leaf, input) in leaves.iter().zip(inputs) {
            let leaf = session.value(leaf)?;
            // A leaf is a variable: it has no op whose drop would be recorded.
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
    // The input is the segment's output: the node stands for the segment's graph.
    record(Call {
        name: CHECKPOINT,
        attributes: Vec::new(),
        composed: false,
        inputs: &[&output],
        extra_inputs: &[],
        output: (output.shape().clone(), output.dtype()),
        saved: Vec::new(),
        is_tracked: true, // through the inputs and the weights that it reads
        held: Arc::new(inputs.map(Tensor::clone)),
    })
}

/// Returns the leaf variable that stands for the input `x` inside a segment. An input without a gradient is returned
/// detached.
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
            extra_inputs: Vec::new(),
            output,
            saved: Vec::new(),
        }));
        let leaf = meta_tensor(x.shape(), x.dtype(), Role::Output, true)?;
        session.add_made(&leaf, true);
        Ok(leaf)
    })
}
