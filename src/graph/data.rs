//! What a trace has seen, as data.

use crate::kernels::Mask;
use crate::probe::Path;
use candle_core::{DType, Device};
use std::fmt;

/// A function's forward: what it reads, computes and drops, in the order of execution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    // Not public: ids in `events` and `outputs` are within `values`, which readers of a graph rely on.
    pub(crate) target: Target,
    pub(crate) values: Vec<Value>,
    pub(crate) events: Vec<TraceEvent>,
    pub(crate) outputs: Vec<ValueRef>,
}

/// A value's index in [`Graph::values()`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub usize);

/// A tensor's elements. Views of one tensor are one value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Its shape, as it was made; of a constant, as it was first read.
    pub shape: Vec<usize>,
    /// Of its elements.
    pub dtype: DType,
    /// Where it comes from.
    pub source: Source,
    /// Whether a gradient can reach it: of weights, and of what is computed from them outside of
    /// [`no_grad`](crate::no_grad()).
    pub tracked: bool,
}

impl Value {
    /// How many elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size_in_bytes()
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// A variable, by its name; empty if it has no name ([`name`](super::name())).
    Weight(String),
    /// An argument of the function, by its name ([`input`](super::input())).
    Input(String),
    /// A real tensor that is no variable: a table of angles, say.
    Constant,
    /// The node that makes it or keeps it.
    Node,
}

/// What makes a segment's output, as nodes name it.
pub(crate) const CHECKPOINT: &str = "checkpoint";
/// What makes a segment's own variable of an input, as nodes name it.
pub(crate) const LEAF: &str = "copy";

/// What happened in a forward.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TraceEvent {
    /// An op ran.
    Node(Node),
    /// A segment began: a function that is [checkpointed](crate::nn::checkpoint()), recomputed in backward.
    Enter,
    /// The segment that began last has ended. Its output is made by the node that follows.
    Leave,
    /// The outermost autocast region ended: weights' casts that were kept for it are dropped.
    AutocastEnd,
    /// The last tensor that shows this value was dropped, by the function and by candle's graph.
    Drop(ValueId),
}

/// One call of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where in the model, the op's name last: `layers.0/attn/q_proj/linear`.
    pub path: String,
    /// The outermost module that it is in, `layers.0` above; the root, if it is in none.
    pub module: Path,
    /// The op's name.
    pub op: &'static str,
    /// What tells this call from another on the same operands.
    pub attributes: Vec<(&'static str, Attribute)>,
    /// Whether it is composed of candle's own ops, for want of a kernel: its backward is candle's then.
    pub composed: bool,
    /// Its arguments, in the op's order.
    pub inputs: Vec<ValueRef>,
    /// What it reads besides, to which no gradient goes: token ids, angles, a weight's copy in half precision.
    pub reads: Vec<ValueRef>,
    /// What it makes.
    pub output: ValueId,
    /// What it makes for backward beside its output, and keeps if a gradient can reach that.
    pub kept: Vec<Kept>,
}

impl Node {
    /// Whether it stands for a segment, whose output it makes.
    pub(crate) fn ends_segment(&self) -> bool {
        self.op == CHECKPOINT
    }

    /// Whether it makes a segment's own variable of an input.
    pub(crate) fn is_leaf(&self) -> bool {
        self.op == LEAF
    }

    /// Whether it takes a value as an input, or reads it beside.
    pub(crate) fn reads_value(&self, id: ValueId) -> bool {
        let mut read = self.inputs.iter().chain(&self.reads);
        read.any(|operand| operand.value == id)
    }
}

/// What an op keeps for backward.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// What it is to the op: `lse`, say.
    pub name: &'static str,
    /// Which value.
    pub value: ValueId,
}

/// A value as an op reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueRef {
    /// Which value.
    pub value: ValueId,
    /// Which of its elements, in which order; `None` for all of them as they lie.
    pub view: Option<View>,
    /// Whether it is read as part of the graph: not where it was detached before.
    pub tracked: bool,
}

impl ValueRef {
    /// The shape of the operand, a value of these.
    pub(crate) fn shape_in<'a>(&'a self, values: &'a [Value]) -> &'a [usize] {
        match &self.view {
            Some(view) => &view.shape,
            None => &values[self.value.0].shape,
        }
    }
}

/// Elements of a value, by their places.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The view's shape.
    pub shape: Vec<usize>,
    /// Elements from one index to the next, for each dimension.
    pub stride: Vec<usize>,
    /// The first element's place.
    pub offset: usize,
}

/// A parameter of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Attribute {
    /// A number of things.
    Count(usize),
    /// An integer that may be negative: a target that is ignored.
    Integer(i64),
    /// A real number.
    Number(f64),
    /// Which keys a query sees.
    Mask(Mask),
    /// A dtype.
    DType(DType),
    /// Yes or no.
    Flag(bool),
}

impl Graph {
    /// The device whose kernels run.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Every value, in the order in which each was first met.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// What happened, in order.
    pub fn events(&self) -> &[TraceEvent] {
        &self.events
    }

    /// What the traced function returned.
    pub fn outputs(&self) -> &[ValueRef] {
        &self.outputs
    }

    /// The nodes, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.events.iter().filter_map(|event| match event {
            TraceEvent::Node(node) => Some(node),
            _ => None,
        })
    }

    /// The value with this id; `None` for an id of another graph, beyond this one's values.
    pub fn get(&self, id: ValueId) -> Option<&Value> {
        self.values.get(id.0)
    }

    pub(crate) fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// What makes each value, by its index in [`events`](Self::events); `None` for what comes from outside. What an op
    /// keeps is made by it too.
    pub(crate) fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.values.len()];
        for (i, event) in self.events.iter().enumerate() {
            if let TraceEvent::Node(node) = event {
                makers[node.output.0] = Some(i);
                for kept in &node.kept {
                    makers[kept.value.0] = Some(i);
                }
            }
        }
        makers
    }

    /// The shape of an operand: its view's, or its value's; `None` for an operand of another graph, beyond this one's
    /// values.
    pub fn shape<'a>(&'a self, operand: &'a ValueRef) -> Option<&'a [usize]> {
        self.get(operand.value).map(|_| self.shape_of(operand))
    }

    pub(crate) fn shape_of<'a>(&'a self, operand: &'a ValueRef) -> &'a [usize] {
        operand.shape_in(&self.values)
    }

    /// The weights that are read, each once, in the order in which they are read first.
    pub fn weights(&self) -> impl Iterator<Item = (ValueId, &str)> {
        let values = self.values.iter().enumerate();
        values.filter_map(|(i, value)| match &value.source {
            Source::Weight(name) => Some((ValueId(i), name.as_str())),
            _ => None,
        })
    }

    /// `%3`, or a name.
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

/// One line a node, indented by segment:
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
        if !node.reads.is_empty() {
            write!(f, " reading {}", names(&node.reads))?;
        }
        for kept in &node.kept {
            let value = self.value(kept.value);
            let dtype = value.dtype.as_str();
            write!(
                f,
                "; keeps {} %{} {:?} {dtype}",
                kept.name, kept.value.0, value.shape
            )?;
        }
        if node.composed {
            write!(f, " [composed]")?;
        }
        writeln!(f)
    }
}

/// Whose kernels run what is traced or predicted: it decides which ops have one. No such device need be there. Ops that
/// have none on a GPU are composed of candle's there, and keep and take more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Target {
    /// The CPU's.
    #[default]
    Cpu,
    /// Those for NVIDIA's GPUs of compute capability 8.0 and later, in f32, f16 and bf16. In f64, and on older GPUs,
    /// ops are composed of candle's: breakdowns of memory are too low there.
    Cuda,
}

impl Target {
    /// Those that run on `device`. Metal's are taken for the CPU's.
    pub fn of(device: &Device) -> Self {
        match device {
            Device::Cuda(_) => Self::Cuda,
            _ => Self::Cpu,
        }
    }
}

/// [`Target::of`].
impl From<&Device> for Target {
    fn from(device: &Device) -> Self {
        Self::of(device)
    }
}
