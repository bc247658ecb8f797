//! The lowering of ops: forward and backward as calls of kernels ([`Kernel`], [`Slices`]), as data. An op's lowering is
//! in its file and in its [`OpInfo`](super::info::OpInfo); [`compile`](crate::compile) allocates the buffers.

mod accumulate;
mod convert;
mod kernel;
mod map;
mod named;
#[cfg(feature = "cuda")]
mod operands;
mod slices;

pub use accumulate::Accumulate;
pub(crate) use convert::{CONVERTED, converted};
pub(super) use kernel::MATMUL;
pub use kernel::{Kernel, Workspace};
pub(crate) use kernel::{kernel, on_gpu};
pub(super) use map::{map, map_backward, map_forward};
pub use named::Named;
#[cfg(feature = "cuda")]
pub(crate) use operands::{Multiplier, Operands};
pub(crate) use slices::{Slice, Slices, StepState};

use crate::graph::{self, Attribute, Graph, Node, Value, ValueId};
use crate::probe::Operand;
use candle_core::DType;
use std::ops::Range;

/// The lowering of an op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lowering {
    /// Computes the output and what is saved for backward.
    pub forward: fn(&Signature<'_>) -> Calls,
    /// Computes the gradients of the inputs from that of the output.
    pub backward: fn(&Signature<'_>) -> Calls,
}

/// The attributes, shapes and dtypes of a call, from which its lowering is planned.
pub(crate) struct Signature<'a> {
    pub attributes: &'a [(&'static str, Attribute)],
    pub inputs: Vec<Operand<'a>>,
    pub extra_inputs: Vec<Operand<'a>>,
    pub output: Operand<'a>,
    pub saved: Vec<Operand<'a>>,
    /// The device whose kernels run.
    pub target: graph::Target,
    /// The context in a plan; `None` for eager calls.
    pub plan: Option<PlanContext<'a>>,
}

/// The attributes and operands of a node.
pub(crate) struct NodeOperands<'a> {
    pub attributes: &'a [(&'static str, Attribute)],
    pub inputs: &'a [graph::ValueRef],
    pub extra_inputs: &'a [graph::ValueRef],
    pub output: ValueId,
    pub saved: &'a [graph::Saved],
}

/// The context of a call in a plan. In a plan, backward may overwrite the output's gradient with the output.
#[derive(Clone, Copy)]
pub(crate) struct PlanContext<'a> {
    /// Whether the output and the second output have gradients, in backward.
    pub has_grad: [bool; 2],
    /// Whether backward has to compute the gradient of each input.
    pub needs_grad: &'a [bool],
}

impl<'g> Signature<'g> {
    /// Returns the signature of a node of a graph.
    pub fn of(graph: &'g Graph, node: &'g Node) -> Self {
        let call = NodeOperands {
            attributes: &node.attributes,
            inputs: &node.inputs,
            extra_inputs: &node.extra_inputs,
            output: node.output,
            saved: &node.saved,
        };
        Self::of_values(&graph.values, call, graph.target, None)
    }

    /// Returns the signature of a node whose operands are among `values`.
    pub fn of_values(
        values: &'g [Value],
        node: NodeOperands<'g>,
        target: graph::Target,
        plan: Option<PlanContext<'g>>,
    ) -> Self {
        let of_value = |id: ValueId| Operand {
            dims: &values[id.0].shape,
            dtype: values[id.0].dtype,
        };
        let operands = |operands: &'g [graph::ValueRef]| {
            let operands = operands.iter().map(|operand| Operand {
                dims: operand.shape_in(values),
                dtype: values[operand.value.0].dtype,
            });
            operands.collect()
        };
        Self {
            attributes: node.attributes,
            inputs: operands(node.inputs),
            extra_inputs: operands(node.extra_inputs),
            output: of_value(node.output),
            saved: node
                .saved
                .iter()
                .map(|saved| of_value(saved.value))
                .collect(),
            target,
            plan,
        }
    }

    /// Returns whether backward has to compute the gradient of an input. True outside of plans, where it is unknown.
    pub fn needs_grad(&self, input: usize) -> bool {
        self.plan.is_none_or(|plan| plan.needs_grad[input])
    }

    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        kernel::find(self.attributes, name)
    }
}

/// An operand of a kernel, in terms of the op's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    /// An input of the op.
    Input(usize),
    /// An extra input of the op.
    ExtraInput(usize),
    /// The op's output.
    Output,
    /// A value saved for backward.
    Saved(usize),
    /// The gradient of the output.
    OutputGradient,
    /// The gradient of an input, in its shape and dtype.
    Gradient(usize),
    /// A buffer from [`Calls::scratch`].
    Scratch(usize),
    /// A range of another slot ([`Calls::part`]). This and the slots below occur only in plans.
    Part(usize),
    /// The second output of a fused node.
    Second,
    /// The gradient of the second output.
    SecondGradient,
    /// A constant that the plan stores as a table: in f32, rounded to the dtype of the first input.
    Table(usize),
    /// The mean loss of a step.
    StepLoss,
}

/// A condition on the elements of an extra input, checked before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// All ids are under the bound or equal to `ignore`.
    Ids { bound: usize, ignore: Option<i64> },
    /// First keys never decrease along a sequence.
    FirstKeys,
}

/// The calls of a forward or a backward.
#[derive(Default)]
pub(crate) struct Calls {
    pub calls: Vec<KernelCall>,
    pub scratch: Vec<Scratch>,
    /// Ranges of slots.
    pub parts: Vec<(Slot, Range<usize>)>,
    /// Aliases. Forward: the output is this input. Backward: the gradient of this input is the other slot.
    pub aliases: Vec<(usize, Slot)>,
    /// A check of the extra input with this [index](Signature::extra_inputs).
    pub check: Option<(usize, Check)>,
}

/// A buffer that only the calls of one node use.
pub(crate) struct Scratch {
    /// Its name in the op's formula; `None` for scratch.
    pub name: Option<&'static str>,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

pub(crate) struct KernelCall {
    pub kernel: Kernel,
    pub reads: Named<Slot>,
    pub writes: Named<Slot>,
}

impl Calls {
    pub fn call(
        mut self,
        kernel: Kernel,
        reads: impl Into<Named<Slot>>,
        writes: impl Into<Named<Slot>>,
    ) -> Self {
        self.push(kernel, reads, writes);
        self
    }

    /// Adds a call to `self` in place.
    pub fn push(
        &mut self,
        kernel: Kernel,
        reads: impl Into<Named<Slot>>,
        writes: impl Into<Named<Slot>>,
    ) {
        self.calls.reserve_exact(1); // exact: there are few calls, but their records matter next to small tensors
        self.calls.push(KernelCall {
            kernel,
            reads: reads.into(),
            writes: writes.into(),
        });
    }

    /// Declares that input `input` is passed on unchanged: in forward the output is the input, in backward its gradient
    /// is the output's.
    pub fn alias(mut self, input: usize) -> Self {
        self.aliases.push((input, Slot::OutputGradient));
        self
    }

    /// Returns the slot of `count` elements of another, starting at `first`.
    pub fn part(&mut self, slot: Slot, first: usize, count: usize) -> Slot {
        self.parts.push((slot, first..first + count));
        Slot::Part(self.parts.len() - 1)
    }

    /// Returns the slot that a slot is a range of, or the slot itself.
    pub fn base(&self, slot: Slot) -> Slot {
        match slot {
            Slot::Part(i) => self.parts[i].0,
            slot => slot,
        }
    }

    /// Adds a check of an extra input.
    pub fn checked(self, read: usize, check: Check) -> Self {
        Self {
            check: Some((read, check)),
            ..self
        }
    }

    /// Returns input `input`, converted to f32 for GPU kernels, which support no other dtype here. CPU kernels widen it
    /// as they read.
    pub fn widened_on_gpu(&mut self, signature: &Signature<'_>, input: usize) -> Slot {
        let (from, x) = (Slot::Input(input), &signature.inputs[input]);
        if signature.target == graph::Target::Cpu || x.dtype == x.wide_dtype() {
            return from;
        }
        let wide = self.scratch(x.dims, x.wide_dtype());
        self.push(converted(), [("x", from)], [("y", wide)]);
        wide
    }

    /// Adds the call of a backward with one kernel. It writes dx, the gradient of input 0, in x's dtype, and the
    /// gradients of the inputs `wide` in the compute dtype; those of half-precision inputs are rounded afterwards.
    /// `partials` is its scratch.
    pub fn wide_gradients(
        mut self,
        signature: &Signature<'_>,
        kernel: Kernel,
        reads: impl Into<Named<Slot>>,
        wide: &[(&'static str, usize)],
        partials: Slot,
    ) -> Self {
        let mut writes = Named::from([("dx", Slot::Gradient(0))]);
        let mut rounded = Vec::new();
        for (name, input) in wide {
            let (weight, dtype) = (&signature.inputs[*input], signature.inputs[0].wide_dtype());
            let gradient = match weight.dtype == dtype {
                true => Slot::Gradient(*input),
                false => {
                    let sum = self.scratch(weight.dims, dtype);
                    rounded.push((sum, Slot::Gradient(*input)));
                    sum
                }
            };
            writes.push(name, gradient);
        }
        writes.push("partials", partials);
        let calls = self.call(kernel, reads, writes);
        rounded.into_iter().fold(calls, |calls, (sum, gradient)| {
            calls.call(converted(), [("x", sum)], [("y", gradient)])
        })
    }

    /// Returns the calls, except those that only compute gradients nobody needs, each with the slots that no later call
    /// reads or writes.
    pub fn needed(&self, wants: impl Fn(usize) -> bool) -> Vec<(&KernelCall, Vec<Slot>)> {
        let mut needed: Vec<(&KernelCall, Vec<Slot>)> = Vec::new();
        let mut later: Vec<Slot> = Vec::new(); // read or written by the calls after
        for call in self.calls.iter().rev() {
            let is_needed = |slot: &Slot| match slot {
                Slot::Gradient(input) => wants(*input),
                Slot::Scratch(_) => later.contains(slot),
                _ => true,
            };
            if call.writes.iter().any(is_needed) {
                let operands = call.reads.iter().chain(call.writes.iter()).copied();
                let last: Vec<Slot> = operands.filter(|slot| !later.contains(slot)).collect();
                later.extend(&last);
                needed.push((call, last));
            }
        }
        needed.reverse();
        needed
    }

    /// Returns whether a call reads `slot`.
    pub fn reads(&self, slot: Slot) -> bool {
        let mut read = self.calls.iter().flat_map(|call| call.reads.iter());
        read.any(|other| *other == slot)
    }

    /// Returns whether the calls overwrite a value saved for backward.
    pub fn overwrites_saved(&self) -> bool {
        let mut written = self.calls.iter().flat_map(|call| call.writes.iter());
        written.any(|slot| matches!(slot, Slot::Saved(_)))
    }

    /// Returns the scratch memory that a kernel of these calls needs on the CPU.
    pub fn workspace(&self, call: &KernelCall, signature: &Signature<'_>) -> Option<Workspace> {
        let first = call.reads.first();
        let first = first.and_then(|slot| self.operand(*slot, signature));
        call.kernel.workspace(first.map(|first| first.dtype))
    }

    /// Returns shape and dtype of a slot; `None` for slots that only occur in plans.
    pub fn operand<'a>(&'a self, slot: Slot, signature: &Signature<'a>) -> Option<Operand<'a>> {
        match slot {
            Slot::Input(i) | Slot::Gradient(i) => signature.inputs.get(i).copied(),
            Slot::Output | Slot::OutputGradient => Some(signature.output),
            Slot::ExtraInput(i) => signature.extra_inputs.get(i).copied(),
            Slot::Saved(i) => signature.saved.get(i).copied(),
            Slot::Scratch(i) => self.scratch.get(i).map(|scratch| Operand {
                dims: &scratch.shape,
                dtype: scratch.dtype,
            }),
            _ => None,
        }
    }

    /// Returns the memory of the copy of checked ids, which an eager op keeps on the host.
    pub fn checked_ids(&self, signature: &Signature<'_>) -> Option<Workspace> {
        match self.check {
            Some((read, Check::Ids { .. })) => Some(Workspace {
                what: "saved ids",
                formula: "BT",
                elements: signature.extra_inputs[read].elements(),
                element_bytes: size_of::<u32>(),
            }),
            _ => None,
        }
    }

    /// Adds a buffer for these calls.
    pub fn scratch(&mut self, shape: &[usize], dtype: DType) -> Slot {
        self.buffer(None, shape, dtype)
    }

    /// Returns a buffer with a name, for an operand of the op's formula.
    pub fn temporary(&mut self, name: &'static str, shape: &[usize], dtype: DType) -> Slot {
        self.buffer(Some(name), shape, dtype)
    }

    fn buffer(&mut self, name: Option<&'static str>, shape: &[usize], dtype: DType) -> Slot {
        let shape = shape.to_vec();
        self.scratch.push(Scratch { name, shape, dtype });
        Slot::Scratch(self.scratch.len() - 1)
    }
}
