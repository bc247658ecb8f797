//! A model's forward as data: traced once, without computing anything.
//!
//! [`trace`] runs any forward that is written with this crate's layers and ops over *hollow* tensors, which have a
//! shape and a dtype and no elements, and returns a [`Graph`]: every op with its place in the model, its attributes,
//! what it reads and makes and keeps for backward; the segments that are checkpointed or released; where autocast
//! regions end and where tensors are dropped. A graph is plain data: it can be compared, printed and read by anything
//! that wants to know what a model does, and tracing a model of ten billion parameters takes milliseconds and no memory
//! for weights. It prints as text, one line a node, and is drawn by [`Graph::to_dot`];
//! [`profile::node_table`](crate::profile::node_table()) is a table of its nodes with what each costs.
//!
//! ```
//! use candle_core::DType;
//! use tallow::graph::{self, Target};
//! use tallow::model::{TransformerConfig, TransformerLM};
//!
//! let config = TransformerConfig::preset("10b")?;
//! let model = TransformerLM::from_var_builder(&config, graph::weights(DType::F32))?;
//! let tokens = graph::input("tokens", (4, 256), DType::U32)?; // (B, T)
//! let targets = graph::input("targets", (4, 256), DType::U32)?; // (B, T)
//! let graph = graph::trace(Target::Cpu, || model.loss(&tokens, &targets))?;
//! assert_eq!(graph.nodes().filter(|node| node.op == "swiglu_linear").count(), config.num_layers);
//! println!("{graph}");
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! What lives here: hollow tensors ([`input`], [`weights`], [`is_hollow`]), the trace, and the graph as data. What does
//! not: what a reader makes of a graph, and what each op says of itself, which is in the op's own file.
//!
//! # Hollow tensors
//!
//! A hollow tensor is an ordinary candle tensor whose storage is empty. Views of it (`narrow`, `transpose`, `reshape`
//! of a contiguous one, `broadcast_as`), `detach` and `Var::from_tensor` of a hollow weight work as always. candle's
//! own arithmetic on it is an error where it is called; [`crate::ops`] has what models need. A real tensor may be an
//! operand too: a variable is then a weight, any other a constant, and neither is read.

mod data;
mod dot;
mod hollow;
mod segment;
mod session;
mod steps;

pub use data::{
    Attribute, Event, Graph, Kept, Node, Operand, SegmentKind, Source, Value, ValueId, View,
};
pub(crate) use hollow::gives_hollow;
pub use hollow::{input, is_hollow, weights};
pub(crate) use segment::segment;
pub use session::{Outputs, Target, name, trace};
pub use steps::{Room, Step};

pub(crate) use hollow::{are_on_one_device, constant};
pub(crate) use session::{
    Traced, autocast_ended, is_tracing, kept_value, record, refuse_hollow, target,
    trace_with_tensors,
};
