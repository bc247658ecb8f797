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
pub(super) use kernel::PRODUCT;
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
    /// Its output, and what it keeps.
    pub forward: fn(&Signature<'_>) -> Calls,
    /// The gradients of its inputs, from that of its output.
    pub backward: fn(&Signature<'_>) -> Calls,
}

/// What a lowering knows of a call: attributes, shapes and dtypes.
pub(crate) struct Signature<'a> {
    pub attributes: &'a [(&'static str, Attribute)],
    pub inputs: Vec<Operand<'a>>,
    pub reads: Vec<Operand<'a>>,
    pub output: Operand<'a>,
    pub kept: Vec<Operand<'a>>,
    /// Whose kernels run.
    pub target: graph::Target,
    /// Set for calls in a plan.
    pub plan: Option<PlanContext<'a>>,
}

/// The attributes and operands of a node.
pub(crate) struct NodeOperands<'a> {
    pub attributes: &'a [(&'static str, Attribute)],
    pub inputs: &'a [graph::ValueRef],
    pub reads: &'a [graph::ValueRef],
    pub output: ValueId,
    pub kept: &'a [graph::Kept],
}

/// What a lowering knows of a call in a plan. There, backward may overwrite the output's gradient with the output.
#[derive(Clone, Copy)]
pub(crate) struct PlanContext<'a> {
    /// Whether the output and the second output have gradients, in backward.
    pub has_grad: [bool; 2],
    /// By input: whether backward has to compute its gradient.
    pub needs_grad: &'a [bool],
}

impl<'g> Signature<'g> {
    /// Returns the signature of a node of a graph.
    pub fn of(graph: &'g Graph, node: &'g Node) -> Self {
        let call = NodeOperands {
            attributes: &node.attributes,
            inputs: &node.inputs,
            reads: &node.reads,
            output: node.output,
            kept: &node.kept,
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
            reads: operands(node.reads),
            output: of_value(node.output),
            kept: node.kept.iter().map(|kept| of_value(kept.value)).collect(),
            target,
            plan,
        }
    }

    /// Whether backward has to compute the gradient of an input. True outside of plans, where this is not known.
    pub fn needs_grad(&self, input: usize) -> bool {
        self.plan.is_none_or(|plan| plan.needs_grad[input])
    }

    /// The attribute with this name.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        kernel::find(self.attributes, name)
    }
}

/// What a kernel reads or writes, in terms of the op's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    /// An input of the op.
    Input(usize),
    /// What the op reads beside its inputs.
    Read(usize),
    /// The op's output.
    Output,
    /// What the op keeps for backward.
    Kept(usize),
    /// The gradient of the output.
    OutputGradient,
    /// The gradient of an input, in its shape and dtype.
    Gradient(usize),
    /// What [`Calls::scratch`] has made.
    Scratch(usize),
    /// A range of another slot ([`Calls::part`]). This and the slots below occur only in plans.
    Part(usize),
    /// The second output of a fused node.
    Second,
    /// Its gradient.
    SecondGradient,
    /// A constant that the plan stores as a table: in f32, rounded to the dtype of the first input.
    Table(usize),
    /// The mean loss of a step.
    StepLoss,
}

/// What the elements of a read must be, checked before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// All are under the bound, but those that are to be ignored.
    Ids { bound: usize, ignore: Option<i64> },
    /// They never fall along a sequence.
    FirstKeys,
}

/// A forward or a backward.
#[derive(Default)]
pub(crate) struct Calls {
    pub calls: Vec<KernelCall>,
    /// Buffers for these calls alone.
    pub scratch: Vec<Scratch>,
    /// Ranges of slots.
    pub parts: Vec<(Slot, Range<usize>)>,
    /// Aliases. Forward: the output is this input. Backward: the gradient of this input is the other slot.
    pub same: Vec<(usize, Slot)>,
    /// Of which of the op's [`reads`](Signature::reads).
    pub check: Option<(usize, Check)>,
}

/// A buffer that only the calls of one node use.
pub(crate) struct Scratch {
    /// Its name in the op's formula; `None` for scratch.
    pub name: Option<&'static str>,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

/// A kernel, and its operands.
pub(crate) struct KernelCall {
    pub kernel: Kernel,
    pub reads: Named<Slot>,
    pub writes: Named<Slot>,
}

impl Calls {
    /// With one more call.
    pub fn call(
        mut self,
        kernel: Kernel,
        reads: impl Into<Named<Slot>>,
        writes: impl Into<Named<Slot>>,
    ) -> Self {
        self.push(kernel, reads, writes);
        self
    }

    /// As [`call`](Self::call), in place.
    pub fn push(
        &mut self,
        kernel: Kernel,
        reads: impl Into<Named<Slot>>,
        writes: impl Into<Named<Slot>>,
    ) {
        self.calls.reserve_exact(1); // few: their records count beside small tensors
        self.calls.push(KernelCall {
            kernel,
            reads: reads.into(),
            writes: writes.into(),
        });
    }

    /// With input `input` passed on as it is.
    pub fn same(mut self, input: usize) -> Self {
        self.same.push((input, Slot::OutputGradient));
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

    /// With a read to be checked.
    pub fn checked(self, read: usize, check: Check) -> Self {
        Self {
            check: Some((read, check)),
            ..self
        }
    }

    /// Input `input` in f32 where a GPU's kernel takes it in nothing else: the CPU's widen it as they read.
    pub fn widened_on_gpu(&mut self, signature: &Signature<'_>, input: usize) -> Slot {
        let (from, x) = (Slot::Input(input), &signature.inputs[input]);
        if signature.target == graph::Target::Cpu || x.dtype == x.wide_dtype() {
            return from;
        }
        let wide = self.scratch(x.dims, x.wide_dtype());
        self.push(converted(), [("x", from)], [("y", wide)]);
        wide
    }

    /// With a backward of one kernel, which writes dx, the gradient of input 0, in its dtype, and those of the inputs
    /// `wide` in the one that is computed in: rounded after, where these are half precision. It works in `partials`.
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

    /// The calls, but those that nothing comes of but gradients of inputs that want none; and what each is the last to
    /// read or write.
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

    /// Whether a call reads this.
    pub fn reads(&self, slot: Slot) -> bool {
        let mut read = self.calls.iter().flat_map(|call| call.reads.iter());
        read.any(|other| *other == slot)
    }

    /// Whether a backward writes over what forward has left.
    pub fn writes_over_kept(&self) -> bool {
        let mut written = self.calls.iter().flat_map(|call| call.writes.iter());
        written.any(|slot| matches!(slot, Slot::Kept(_)))
    }

    /// What a kernel of these calls takes for itself on the CPU.
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
            Slot::Read(i) => signature.reads.get(i).copied(),
            Slot::Kept(i) => signature.kept.get(i).copied(),
            Slot::Scratch(i) => self.scratch.get(i).map(|scratch| Operand {
                dims: &scratch.shape,
                dtype: scratch.dtype,
            }),
            _ => None,
        }
    }

    /// The copy of the ids that are checked, which an eager op keeps on the host.
    pub fn checked_ids(&self, signature: &Signature<'_>) -> Option<Workspace> {
        match self.check {
            Some((read, Check::Ids { .. })) => Some(Workspace {
                what: "ids that ops keep",
                formula: "BT",
                elements: signature.reads[read].elements(),
                element_bytes: size_of::<u32>(),
            }),
            _ => None,
        }
    }

    /// A buffer for these calls.
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
