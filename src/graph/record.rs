//! Recording of op calls and of checkpointed segments in the open trace.

use super::data::{Attribute, CHECKPOINT, Kept, LEAF, Node, TraceEvent, ValueId};
use super::hollow::{Role, empty, hollow, hollow_out};
use super::session::{dropped, with_session};
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
    pub reads: &'a [Tensor],
    pub output: (Shape, DType),
    /// The name, shape and dtype of each tensor saved for backward.
    pub kept: Vec<(&'static str, Shape, DType)>,
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
        session.told_drops(); // before the operands: an operand that is read now is alive
        let inputs = call.inputs.iter().map(|x| session.operand(x));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let reads = call.reads.iter().map(|x| session.operand(x));
        let reads = reads.collect::<Result<Vec<_>>>()?;
        // Checked in the value table too: a meta output has a node of candle's even where a real one has none.
        let tracked =
            call.is_tracked || is_grad_enabled() && inputs.iter().any(|operand| operand.tracked);
        let output = ValueId(session.graph.values.len());
        let kept = call.kept.iter().enumerate().map(|(i, (name, _, _))| Kept {
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
            reads,
            output,
            kept: kept.collect(),
        }));
        let (shape, dtype) = call.output;
        // Without a graph, nothing outlives the call.
        let keeps = tracked.then(|| {
            let inputs: Vec<Tensor> = call.inputs.iter().map(|x| (*x).clone()).collect();
            (call.held, inputs)
        });
        let y = Behind {
            name: call.name,
            shape,
            dtype,
            trace: session.id,
            value: output,
            _keeps: keeps,
        }
        .tensor()?;
        session.add_made(&y, tracked);
        for (_, shape, dtype) in call.kept {
            let kept = hollow(shape, dtype, Role::Output, false)?;
            session.add_made(&kept, false);
        }
        Ok(y)
    })
}

/// Returns the tensor that the op of output `y` saved for backward as `name`.
pub(crate) fn kept_value(y: &Tensor, name: &str) -> Result<Option<Tensor>> {
    with_session(|session| {
        let value = session.value(y)?;
        let mut latest = session.graph.events.iter().rev();
        let node = latest.find_map(|event| match event {
            TraceEvent::Node(node) if node.output == value => Some(node),
            _ => None,
        });
        let kept = node.and_then(|node| node.kept.iter().find(|kept| kept.name == name));
        Ok(kept.map(|kept| session.held[kept.value.0].clone()))
    })
}

/// The candle op of a meta output. candle's graph holds it like a real op and drops it with the last tensor, which
/// records the drop.
struct Behind {
    name: &'static str,
    shape: Shape,
    dtype: DType,
    trace: u64,
    value: ValueId,
    /// Kept alive with it: what the op's backward holds, and the inputs that backward would read.
    _keeps: Option<(Arc<dyn Any + Send + Sync>, Vec<Tensor>)>,
}

impl Drop for Behind {
    fn drop(&mut self) {
        dropped(self.trace, self.value);
    }
}

impl CustomOp1 for Behind {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((empty(self.dtype)?, self.shape.clone()))
    }
}

impl Behind {
    /// Returns the meta tensor whose op this is. candle keeps a tensor's op only if an argument is tracked, so each op
    /// gets a variable that nothing else shares.
    fn tensor(self) -> candle_core::Result<Tensor> {
        let tracked = Var::zeros((), DType::F32, &Device::Cpu)?;
        let x = tracked.apply_op1(self)?;
        hollow_out(&x, Role::Output)?;
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
        session.told_drops();
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
        reads: &[],
        output: (output.shape().clone(), output.dtype()),
        kept: Vec::new(),
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
            reads: Vec::new(),
            output,
            kept: Vec::new(),
        }));
        let leaf = hollow(x.shape(), x.dtype(), Role::Output, true)?;
        session.add_made(&leaf, true);
        Ok(leaf)
    })
}
