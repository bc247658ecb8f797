//! Calls of ops in the trace that is open, and the hollow tensors that they return.

use super::data::{Kept, Node, TraceEvent, ValueId};
use super::hollow::{Role, empty, hollow, hollow_out};
use super::session::{dropped, target, with_session};
use crate::grad::is_grad_enabled;
use crate::ops::lowering::Signature;
use crate::ops::record::{By, Spec, steps_of};
use crate::{Result, probe};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use std::any::Any;

/// Writes down a call of `op` on `inputs`, and returns its hollow output.
pub(crate) fn record<C: Spec + Send + Sync + 'static>(
    name: &'static str,
    op: C,
    inputs: &[&Tensor],
    by: By,
) -> Result<Tensor> {
    let shapes: Vec<probe::Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let (shape, dtype) = op.output(&shapes);
    let on = target().unwrap_or_default();
    let kept = op.kept(&shapes, on);
    let read = op.reads();
    let path = probe::op_path(name).to_string();
    with_session(|session| {
        session.told_drops(); // before the operands: what is read has not gone
        let operands = inputs
            .iter()
            .map(|x| session.operand(x))
            .collect::<Result<Vec<_>>>()?;
        let reads = read
            .iter()
            .map(|x| session.operand(x))
            .collect::<Result<Vec<_>>>()?;
        let kept_operands = kept.iter().map(|(_, shape, dtype)| probe::Operand {
            dims: shape.dims(),
            dtype: *dtype,
        });
        let attributes = op.attributes();
        let call = Signature {
            attributes: &attributes,
            inputs: shapes,
            reads: read.iter().map(Into::into).collect(),
            output: probe::Operand {
                dims: shape.dims(),
                dtype,
            },
            kept: kept_operands.collect(),
            target: on,
        };
        let of_inputs: Vec<bool> = operands.iter().map(|operand| operand.tracked).collect();
        let [forward, backward] = steps_of(name, &op, by, &call, &of_inputs);
        // By the table too: a hollow output has a node of candle's where a real one has none.
        let tracked = is_grad_enabled() && operands.iter().any(|operand| operand.tracked);
        let tracked = tracked || op.is_tracked();
        let output = ValueId(session.graph.values.len());
        let kept_values = kept.iter().enumerate().map(|(i, (name, _, _))| Kept {
            name,
            value: ValueId(output.0 + 1 + i),
        });
        session.push(TraceEvent::Node(Node {
            path,
            op: name,
            attributes,
            composed: by == By::Candle,
            inputs: operands,
            reads,
            output,
            kept: kept_values.collect(),
            forward,
            backward,
        }));
        op.forwarded();
        // Without a graph nothing outlives the call.
        let keeps = tracked.then(|| {
            let inputs: Vec<Tensor> = inputs.iter().map(|x| (*x).clone()).collect();
            (Box::new(op) as Box<dyn Any + Send + Sync>, inputs)
        });
        let y = Behind {
            name,
            shape,
            dtype,
            trace: session.id,
            value: output,
            _keeps: keeps,
        }
        .tensor()?;
        session.add_made(&y, tracked);
        for (_, shape, dtype) in kept {
            let kept = hollow(shape, dtype, Role::Output, false)?;
            session.add_made(&kept, false);
        }
        Ok(y)
    })
}

/// What the op that made `y` keeps as `name`, as a tensor.
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

/// What holds a hollow output's value: candle's graph holds it as it holds a real op, and drops it with the last
/// tensor.
struct Behind {
    name: &'static str,
    shape: Shape,
    dtype: DType,
    trace: u64,
    value: ValueId,
    /// What lives as long: what the op keeps, and the inputs that backward would read.
    _keeps: Option<(Box<dyn Any + Send + Sync>, Vec<Tensor>)>,
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
    /// The hollow tensor that this is behind. candle keeps the op of a tensor only where an argument is tracked, so
    /// each is given a variable that is not shared.
    fn tensor(self) -> candle_core::Result<Tensor> {
        let tracked = Var::zeros((), DType::F32, &Device::Cpu)?;
        let x = tracked.apply_op1(self)?;
        hollow_out(&x, Role::Output)?;
        Ok(x)
    }
}
