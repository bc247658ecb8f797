//! A model's forward pass as data, traced once without computing anything.
//!
//! [`trace`] runs any forward pass that is written with this crate's layers and ops on *meta* tensors, which have a
//! shape and a dtype but no data. It returns a [`Graph`] with every op: its path in the model, its attributes, its
//! operands and what it saves for backward. The graph also has the checkpointed segments, the ends of autocast regions
//! and the points at which tensors are dropped. A graph is plain data that can be compared, printed and analysed.
//! Tracing a model of ten billion parameters takes milliseconds and allocates no weights. A graph prints as text, one
//! line per node. [`Graph::to_dot`] draws it. [`profile::node_table`](crate::profile::node_table()) tabulates its nodes
//! with their costs.
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
//! # Meta tensors
//!
//! [`input`] and [`weights`] make meta tensors, and [`is_meta`] recognises them. A meta tensor is an ordinary candle
//! tensor whose storage is empty. Views of it (`narrow`, `transpose`, `permute`, `squeeze`, `unsqueeze`,
//! `broadcast_as`, `reshape` of a contiguous one), `detach` and `Var::from_tensor` of a meta weight work as usual.
//! candle's own arithmetic on it is an error at the call; use [`crate::ops`] instead. Real tensors may be operands too.
//! A variable is recorded as a weight and any other tensor as a constant; the trace reads the data of neither.

mod candle_ops;
mod data;
mod difference;
mod dot;
mod meta;
mod record;
mod session;

pub use data::{
    Attribute, Graph, Node, Saved, Source, Target, TraceEvent, Value, ValueId, ValueRef, View,
};
pub use meta::{input, is_meta, weights};
pub use session::{Outputs, name, trace};

pub(crate) use candle_ops::explain_mixed_dtypes;
pub(crate) use data::{CHECKPOINT, LEAF};
pub(crate) use meta::{are_on_one_device, builds_meta, constant, meta_tensor_error, meta_weight};
pub(crate) use record::{Call, checkpoint, record, saved_value};
pub(crate) use session::trace_with_tensors;
pub(crate) use session::{Traced, autocast_ended, is_tracing, target, trace_id};
