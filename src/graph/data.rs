//! The data of a traced graph: values, nodes and events.

use crate::kernels::Mask;
use crate::probe::Path;
use candle_core::{DType, Device};
use std::fmt;

/// The forward pass of a function: what it reads, computes and drops, in the order of execution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    // Not public, because readers of a graph rely on the ids in `events` and `outputs` being indices of `values`.
    pub(crate) target: Target,
    pub(crate) values: Vec<Value>,
    pub(crate) events: Vec<TraceEvent>,
    pub(crate) outputs: Vec<ValueRef>,
}

/// A value's index in [`Graph::values()`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub usize);

/// The data of a tensor. All views of one base tensor are one value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The shape as created; for a real tensor, the shape of the view that was read first.
    pub shape: Vec<usize>,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The origin of the value.
    pub source: Source,
    /// Whether a gradient can reach it. True for weights, and for values computed from them outside of
    /// [`no_grad`](crate::no_grad()).
    pub tracked: bool,
}

impl Value {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size of the elements, in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size_in_bytes()
    }
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// A variable, with its name; the name is empty if it was not set ([`name`](super::name())).
    Weight(String),
    /// An argument of the function, with its name ([`input`](super::input())).
    Input(String),
    /// A real tensor that is not a variable, for example a table of rotary angles.
    Constant,
    /// An output of a node, or a tensor that a node saves for backward.
    Node,
}

/// The op name of the node that ends a checkpointed segment and makes its output.
pub(crate) const CHECKPOINT: &str = "checkpoint";
/// The op name of the node that copies a segment's input into a leaf variable.
pub(crate) const LEAF: &str = "copy";

/// An event of a forward pass.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TraceEvent {
    /// An op ran.
    Node(Node),
    /// The start of a segment: a function that is [checkpointed](crate::nn::checkpoint()) and recomputed in backward.
    Enter,
    /// The end of the innermost open segment. The node that follows makes the segment's output.
    Leave,
    /// The end of the outermost autocast region. The casts of weights that it cached are dropped.
    AutocastEnd,
    /// The function and candle's graph have both dropped their last tensor of this value.
    Drop(ValueId),
}

/// One call of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The path in the model, with the op's name last: `layers.0/attn/q_proj/linear`.
    pub path: String,
    /// The outermost module of the path (`layers.0` above), or the root if the op runs in no module.
    pub module: Path,
    /// The op's name.
    pub op: &'static str,
    /// The op's parameters, such as an epsilon or a mask.
    pub attributes: Vec<(&'static str, Attribute)>,
    /// Whether it is composed of candle's own ops, because there is no kernel. Its backward is then candle's.
    pub composed: bool,
    /// The differentiable arguments, in the op's order.
    pub inputs: Vec<ValueRef>,
    /// Extra inputs that receive no gradient: token ids, angles, a weight's copy in half precision.
    pub extra_inputs: Vec<ValueRef>,
    /// The output.
    pub output: ValueId,
    /// Values that it makes for backward in addition to its output. They are saved if a gradient can reach the output.
    pub saved: Vec<Saved>,
}

impl Node {
    /// Returns whether the node ends a segment and makes its output.
    pub(crate) fn ends_segment(&self) -> bool {
        self.op == CHECKPOINT
    }

    /// Returns whether the node copies a segment's input into a leaf variable.
    pub(crate) fn is_leaf(&self) -> bool {
        self.op == LEAF
    }

    /// Returns whether a value is among the node's inputs or extra inputs.
    pub(crate) fn reads_value(&self, id: ValueId) -> bool {
        let mut read = self.inputs.iter().chain(&self.extra_inputs);
        read.any(|operand| operand.value == id)
    }

    /// Returns the attribute `name`, if the node has it.
    pub(crate) fn attribute(&self, name: &str) -> Option<Attribute> {
        let mut attributes = self.attributes.iter();
        attributes.find_map(|(other, value)| (*other == name).then_some(*value))
    }
}

/// A value that an op saves for backward.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The name that the op gives it, for example `lse`.
    pub name: &'static str,
    /// The saved value.
    pub value: ValueId,
}

/// A value, or a view of one, as an operand of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueRef {
    /// The base value.
    pub value: ValueId,
    /// The view of the value; `None` if all elements are read in their stored order.
    pub view: Option<View>,
    /// Whether a gradient flows through this operand. False if the tensor was detached before.
    pub tracked: bool,
}

impl ValueRef {
    /// Returns the operand's shape. `values` are those of its graph.
    pub(crate) fn shape_in<'a>(&'a self, values: &'a [Value]) -> &'a [usize] {
        match &self.view {
            Some(view) => &view.shape,
            None => &values[self.value.0].shape,
        }
    }
}

/// A strided view of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The view's shape.
    pub shape: Vec<usize>,
    /// The stride of each dimension, in elements.
    pub stride: Vec<usize>,
    /// The offset of the first element, in elements.
    pub offset: usize,
}

/// A parameter of an op, as data.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Attribute {
    /// A count, for example of heads.
    Count(usize),
    /// An integer that may be negative, for example an ignored target.
    Integer(i64),
    /// A float.
    Number(f64),
    /// An attention mask.
    Mask(Mask),
    /// A dtype.
    DType(DType),
    /// A bool.
    Flag(bool),
}

impl Graph {
    /// Returns the device type whose kernels the trace assumes.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Returns all values, in the order in which the trace first saw them.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Returns all events, in order.
    pub fn events(&self) -> &[TraceEvent] {
        &self.events
    }

    /// Returns the outputs of the traced function.
    pub fn outputs(&self) -> &[ValueRef] {
        &self.outputs
    }

    /// Returns the nodes, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.events.iter().filter_map(|event| match event {
            TraceEvent::Node(node) => Some(node),
            _ => None,
        })
    }

    /// Returns the value with this id, or `None` if the id is out of range.
    pub fn get(&self, id: ValueId) -> Option<&Value> {
        self.values.get(id.0)
    }

    pub(crate) fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// Returns for each value the index of its node in [`events`](Self::events). Values that a node saves for backward
    /// count as made by it. `None` for weights, inputs and constants.
    pub(crate) fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.values.len()];
        for (i, event) in self.events.iter().enumerate() {
            if let TraceEvent::Node(node) = event {
                makers[node.output.0] = Some(i);
                for saved in &node.saved {
                    makers[saved.value.0] = Some(i);
                }
            }
        }
        makers
    }

    /// Returns the shape of an operand: its view's, or else its value's. `None` if the operand's id is out of range.
    pub fn shape<'a>(&'a self, operand: &'a ValueRef) -> Option<&'a [usize]> {
        self.get(operand.value).map(|_| self.shape_of(operand))
    }

    pub(crate) fn shape_of<'a>(&'a self, operand: &'a ValueRef) -> &'a [usize] {
        operand.shape_in(&self.values)
    }

    /// Returns the weights that are read, each once, in the order of their first read.
    pub fn weights(&self) -> impl Iterator<Item = (ValueId, &str)> {
        let values = self.values.iter().enumerate();
        values.filter_map(|(i, value)| match &value.source {
            Source::Weight(name) => Some((ValueId(i), name.as_str())),
            _ => None,
        })
    }

    /// Returns the operand's text: a name, or `%3`.
    fn operand_name(&self, operand: &ValueRef) -> String {
        let name = match &self.value(operand.value).source {
            Source::Weight(name) | Source::Input(name) if !name.is_empty() => name.clone(),
            Source::Weight(_) => format!("weight {:?}", self.shape_of(operand)),
            Source::Constant => format!("constant {:?}", self.shape_of(operand)),
            _ => format!("%{}", operand.value.0),
        };
        match &operand.view {
            Some(view) => format!("{name} as {:?}", view.shape),
            None => name,
        }
    }
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Mask(mask) => write!(f, "{mask}"),
            Self::DType(dtype) => write!(f, "{}", dtype.as_str()),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

/// Prints one line per node, indented by segment:
/// `%7 (4, 256, 512) f32 = layers.0/ln1/rms_norm {eps 1e-5} (%3, layers.0.ln1.weight)`.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut depth = 0;
        for event in &self.events {
            let indent = 2 * depth;
            match event {
                TraceEvent::Node(node) => {
                    write!(f, "{:indent$}", "")?;
                    self.write_node(f, node)?;
                }
                TraceEvent::Enter => {
                    writeln!(f, "{:indent$}{CHECKPOINT} {{", "")?;
                    depth += 1;
                }
                TraceEvent::Leave => {
                    depth = depth.saturating_sub(1);
                    writeln!(f, "{:1$}}}", "", 2 * depth)?;
                }
                TraceEvent::AutocastEnd => writeln!(f, "{:indent$}end of autocast", "")?,
                TraceEvent::Drop(value) => writeln!(f, "{:indent$}drop %{}", "", value.0)?,
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(|o| self.operand_name(o)).collect();
        writeln!(f, "return {}", outputs.join(", "))
    }
}

impl Graph {
    fn write_node(&self, f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
        let output = self.value(node.output);
        let dtype = output.dtype.as_str();
        write!(
            f,
            "%{} {:?} {dtype} = {}",
            node.output.0, output.shape, node.path
        )?;
        if !node.attributes.is_empty() {
            let attributes = node.attributes.iter();
            let attributes: Vec<String> = attributes.map(|(k, v)| format!("{k} {v}")).collect();
            write!(f, " {{{}}}", attributes.join(", "))?;
        }
        let names = |operands: &[ValueRef]| -> String {
            let names: Vec<String> = operands.iter().map(|o| self.operand_name(o)).collect();
            names.join(", ")
        };
        write!(f, " ({})", names(&node.inputs))?;
        if !node.extra_inputs.is_empty() {
            write!(f, " reading {}", names(&node.extra_inputs))?;
        }
        for saved in &node.saved {
            let value = self.value(saved.value);
            let dtype = value.dtype.as_str();
            write!(
                f,
                "; keeps {} %{} {:?} {dtype}",
                saved.name, saved.value.0, value.shape
            )?;
        }
        if node.composed {
            write!(f, " [composed]")?;
        }
        writeln!(f)
    }
}

/// The device type that a trace or an estimate is for. It decides which ops have a kernel. The device itself need not
/// be present. An op without a kernel on a GPU is composed of candle's ops there, and saves and uses more memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Target {
    /// The CPU.
    #[default]
    Cpu,
    /// NVIDIA GPUs of compute capability 8.0 and later, in f32, f16 and bf16. In f64, and on older GPUs, ops are
    /// composed of candle's, and memory breakdowns are too low.
    Cuda,
}

impl Target {
    /// Returns the target for tensors on `device`. Metal counts as the CPU.
    pub fn of(device: &Device) -> Self {
        match device {
            Device::Cuda(_) => Self::Cuda,
            _ => Self::Cpu,
        }
    }
}

impl From<&Device> for Target {
    fn from(device: &Device) -> Self {
        Self::of(device)
    }
}
