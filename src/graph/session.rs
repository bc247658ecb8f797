//! The trace that is open on a thread: its graph so far, and the values by storage address.

use super::candle_ops::failed_on_meta_tensor;
use super::data::{Graph, Source, Target, TraceEvent, Value, ValueId, ValueRef, View};
use super::meta::Role;
use crate::probe::{self, Listener};
use crate::{Error, Result};
use candle_core::{Storage, Tensor};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The state of an open trace.
pub(super) struct Session {
    /// Unique to this trace, because a tensor of another trace may be dropped while this one is open.
    pub(super) id: u64,
    target: Target,
    pub(super) graph: Graph,
    /// Values by the address of their storage. `held` keeps each storage alive, so no address is reused during the
    /// trace.
    values: HashMap<usize, ValueId>,
    /// A tensor of each value, detached from its op.
    pub(super) held: Vec<Tensor>,
    /// Values whose drop was recorded.
    dropped: HashSet<ValueId>,
    /// The weights and inputs that have a name.
    pub(super) sources: HashSet<Source>,
}

thread_local! {
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
    /// Trace and value of the tensors dropped since the last event. Separate from `SESSION`, because a tensor may be
    /// dropped while that is borrowed.
    static DROPPED: RefCell<Vec<(u64, ValueId)>> = const { RefCell::new(Vec::new()) };
}

/// Opens a trace on this thread. Dropping the returned guard closes it.
///
/// # Errors
/// A trace that is open already.
pub(super) fn open(target: Target) -> Result<Open> {
    if is_tracing() {
        return Err(Error::Order {
            op: "graph::trace",
            problem: "a trace is open on this thread already".into(),
            hint: "call the function itself: its ops are traced".into(),
        });
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    DROPPED.take();
    SESSION.set(Some(Session {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        target,
        graph: Graph {
            target,
            ..Graph::default()
        },
        values: HashMap::new(),
        held: Vec::new(),
        dropped: HashSet::new(),
        sources: HashSet::new(),
    }));
    Ok(Open)
}

pub(super) struct Open;

impl Drop for Open {
    fn drop(&mut self) {
        SESSION.set(None);
        DROPPED.take();
    }
}

pub(crate) fn is_tracing() -> bool {
    SESSION.with_borrow(Option::is_some)
}

/// Returns the id of the open trace, or `None` if none is open.
pub(crate) fn trace_id() -> Option<u64> {
    SESSION.with_borrow(|session| session.as_ref().map(|session| session.id))
}

/// Returns the target of the open trace, or `None` if none is open.
pub(crate) fn target() -> Option<Target> {
    SESSION.with_borrow(|session| session.as_ref().map(|session| session.target))
}

pub(super) fn with_session<R>(f: impl FnOnce(&mut Session) -> Result<R>) -> Result<R> {
    SESSION.with_borrow_mut(|session| match session {
        Some(session) => f(session),
        None => Err(Error::Order {
            op: "graph",
            problem: "no trace is open on this thread".into(),
            hint: "call it in the function that graph::trace is given".into(),
        }),
    })
}

/// Records the end of this thread's outermost autocast region.
pub(crate) fn autocast_ended() {
    SESSION.with_borrow_mut(|session| {
        if let Some(session) = session {
            session.push(TraceEvent::AutocastEnd);
        }
    });
}

/// Notes that the last tensor of a value was dropped. The drop is recorded before the next event.
pub(super) fn note_drop(trace: u64, value: ValueId) {
    // Fails on a thread that is ending, which has no trace.
    let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().push((trace, value)));
}

fn address(x: &Tensor) -> usize {
    let (storage, _) = x.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage) as usize
}

impl Session {
    pub(super) fn push(&mut self, event: TraceEvent) {
        self.record_drops();
        self.graph.events.push(event);
    }

    /// Records the drops since the last event.
    pub(super) fn record_drops(&mut self) {
        let mine = DROPPED
            .take()
            .into_iter()
            .filter(|(trace, _)| *trace == self.id);
        for (_, value) in mine {
            self.dropped.insert(value);
            self.graph.events.push(TraceEvent::Drop(value));
        }
    }

    fn add(&mut self, x: &Tensor, value: Value) -> ValueId {
        let id = ValueId(self.graph.values.len());
        self.values.insert(address(x), id);
        self.held.push(match x.is_variable() {
            true => x.clone(),
            false => x.detach(), // shares the storage, without candle's node
        });
        self.graph.values.push(value);
        id
    }

    /// Adds a value that an op makes.
    pub(super) fn add_made(&mut self, x: &Tensor, tracked: bool) {
        let value = Value {
            shape: x.dims().to_vec(),
            dtype: x.dtype(),
            source: Source::Node,
            tracked,
        };
        self.add(x, value);
    }

    /// Returns the value whose data `x` shows. A tensor that the trace has not seen before becomes a weight, an input
    /// or a constant; a view of a variable becomes the whole weight.
    pub(super) fn value(&mut self, x: &Tensor) -> Result<ValueId> {
        if let Some(id) = self.values.get(&address(x)).copied() {
            let value = &mut self.graph.values[id.0];
            // The variable was first seen through a detached view, for example when it was cast to half precision.
            if value.source == Source::Constant && x.is_variable() {
                (value.source, value.tracked) = (Source::Weight(String::new()), true);
                self.held[id.0] = x.clone();
            }
            return Ok(id);
        }
        if let Some(variable) = viewed_variable(x) {
            return self.value(&variable);
        }
        let mut shape = x.dims().to_vec();
        let source = match Role::of(x) {
            Some(Role::Input(name, whole)) => {
                shape = whole;
                Source::Input(name)
            }
            Some(Role::Weight(name, whole)) => {
                shape = whole;
                Source::Weight(name)
            }
            Some(Role::Output) => {
                return Err(Error::order(
                    "graph::trace",
                    "got a meta tensor that no op of this trace made",
                    "candle's copy and other traces make such tensors: pass the original",
                ));
            }
            None if x.is_variable() => Source::Weight(String::new()),
            None | Some(Role::Constant) => Source::Constant,
        };
        if let Source::Input(name) | Source::Weight(name) = &source
            && !name.is_empty()
            && !self.sources.insert(source.clone())
        {
            return Err(duplicate_name(name));
        }
        let value = Value {
            shape,
            dtype: x.dtype(),
            tracked: matches!(source, Source::Weight(_)) || x.track_op(),
            source,
        };
        Ok(self.add(x, value))
    }

    pub(super) fn operand(&mut self, x: &Tensor) -> Result<ValueRef> {
        let value = self.value(x)?;
        let layout = x.layout();
        let is_whole = layout.start_offset() == 0
            && layout.is_contiguous()
            && layout.dims() == self.graph.value(value).shape;
        let view = (!is_whole).then(|| View {
            shape: layout.dims().to_vec(),
            stride: layout.stride().to_vec(),
            offset: layout.start_offset(),
        });
        // The value is still read, so the drop recorded for its node is removed.
        if self.dropped.remove(&value) {
            let its_drop = TraceEvent::Drop(value);
            self.graph.events.retain(|event| *event != its_drop);
        }
        let tracked = x.track_op() && self.graph.value(value).tracked;
        Ok(ValueRef {
            value,
            view,
            tracked,
        })
    }
}

/// Returns the variable that `x` is a view of, if it is one that backward follows.
fn viewed_variable(x: &Tensor) -> Option<Tensor> {
    if !x.track_op() || x.is_variable() {
        return None;
    }
    let of_same_data = |node: &&&Tensor| node.is_variable() && address(node) == address(x);
    let nodes = x.sorted_nodes();
    nodes.iter().find(of_same_data).map(|node| (*node).clone())
}

pub(super) fn duplicate_name(name: &str) -> Error {
    Error::order(
        "graph::trace",
        format!("{name:?} is the name of two tensors"),
        "name each once; a copy of a meta tensor is indistinguishable from it, so use the original",
    )
}

/// The return type of a traced function.
pub trait Outputs {
    /// Returns the output tensors, in order.
    fn tensors(&self) -> Vec<&Tensor>;
}

impl Outputs for Tensor {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![self]
    }
}

impl Outputs for (Tensor, Tensor) {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.0, &self.1]
    }
}

impl Outputs for Vec<Tensor> {
    fn tensors(&self) -> Vec<&Tensor> {
        self.iter().collect()
    }
}

/// Traces `f` for `target`. `f` is called once; its ops check their operands' shapes and dtypes as usual, but compute
/// nothing.
///
/// The caller's settings decide which ops run, as in a real call: [`autocast`](crate::autocast()) regions,
/// [`no_grad`](crate::no_grad()), the kernel policy. Ops of this crate on real tensors are traced too, and return meta
/// tensors. Token ids are not read, so ids outside of the vocabulary are not detected.
///
/// Drops of values that ops make are recorded when they happen. A value that a gradient's graph holds is dropped with
/// that graph. A detached tensor can outlive the graph that it came from. If a value is read after its recorded drop,
/// that drop is removed.
///
/// ```
/// use candle_core::DType;
/// use tallow::graph::{self, Target};
/// use tallow::ops;
///
/// let x = graph::input("x", (2, 3), DType::F32)?;
/// let graph = graph::trace(Target::Cpu, || ops::sum(&ops::exp(&x)?))?;
/// let ops: Vec<&str> = graph.nodes().map(|node| node.op).collect();
/// assert_eq!(ops, ["exp", "sum"]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Errors of `f`; arithmetic by candle itself on a meta tensor (the error names the op before it); a trace inside a
/// trace.
pub fn trace<T: Outputs>(target: Target, f: impl FnOnce() -> Result<T>) -> Result<Graph> {
    Ok(trace_with_tensors(target, f)?.graph)
}

/// A graph with one tensor per value: the variable itself for a weight, a meta tensor for the output of an op.
pub(crate) struct Traced {
    pub graph: Graph,
    pub tensors: Vec<Tensor>,
}

/// Same as [`trace`], and also returns a tensor of each value.
pub(crate) fn trace_with_tensors<T: Outputs>(
    target: Target,
    f: impl FnOnce() -> Result<T>,
) -> Result<Traced> {
    struct Quiet;
    impl Listener for Quiet {}

    let _listening = probe::listen(Arc::new(Quiet)); // ops have paths only while there is a listener
    let _root = probe::at_root(); // paths start at the root, not at the caller's module
    let _open = open(target)?;
    let result = f().map_err(with_op_path)?;
    with_session(|session| {
        session.record_drops();
        for output in result.tensors() {
            let operand = session.operand(output)?;
            session.graph.outputs.push(operand);
        }
        Ok(Traced {
            graph: std::mem::take(&mut session.graph),
            tensors: std::mem::take(&mut session.held),
        })
    })
}

/// Rewrites an error of one of candle's ops on a meta tensor as one that names the op, its place and a counterpart.
fn with_op_path(error: Error) -> Error {
    let Some((calls, instead)) = failed_on_meta_tensor(&error) else {
        return error;
    };
    let last = with_session(|session| {
        let mut events = session.graph.events.iter().rev();
        Ok(events.find_map(|event| match event {
            TraceEvent::Node(node) => Some(node.path.clone()),
            _ => None,
        }))
    });
    let place = match last.ok().flatten() {
        Some(path) => format!("after {path}"),
        None => "before the first op".into(),
    };
    let problem = format!("{place}, {calls} of candle was called on a meta tensor");
    let hint = format!("{instead}; a trace records only functions of tallow::ops");
    Error::order("graph::trace", problem, hint)
}

/// Names the weight or input `x` in the open trace. Only needed for real variables, which have no name of their own.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::graph::{self, Target};
/// use tallow::ops;
///
/// let w = Var::ones((5, 3), DType::F32, &Device::Cpu)?;
/// let x = graph::input("x", (2, 3), DType::F32)?;
/// let graph = graph::trace(Target::Cpu, || {
///     graph::name(&w, "head.weight")?;
///     ops::linear(&x, &w)
/// })?;
/// assert_eq!(graph.weights().next().map(|(_, name)| name), Some("head.weight"));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// No open trace; a name that another value has; a tensor that an op has made.
pub fn name(x: &Tensor, name: &str) -> Result<()> {
    with_session(|session| {
        let id = session.value(x)?;
        let named = match session.graph.values[id.0].source {
            Source::Weight(_) => Source::Weight(name.into()),
            Source::Input(_) | Source::Constant => Source::Input(name.into()),
            Source::Node => {
                return Err(Error::Order {
                    op: "graph::name",
                    problem: format!("{name:?} was made by an op"),
                    hint: "weights and inputs have names".into(),
                });
            }
        };
        let is_new = session.graph.values[id.0].source != named;
        if is_new && !session.sources.insert(named.clone()) {
            return Err(duplicate_name(name));
        }
        if is_new {
            session.sources.remove(&session.graph.values[id.0].source);
        }
        session.graph.values[id.0].source = named;
        Ok(())
    })
}
