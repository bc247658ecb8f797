//! Tracing a function: the trace that is open on a thread, its graph so far, and values by their storage.

use super::data::{Graph, Source, Target, TraceEvent, Value, ValueId, ValueRef, View};
use super::hollow::Role;
use crate::probe::{self, Listener};
use crate::{Error, Result};
use candle_core::{Storage, Tensor};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What has been seen since the trace was opened.
pub(super) struct Session {
    /// Of this trace alone: a tensor of another may be dropped while it is open.
    pub(super) id: u64,
    target: Target,
    pub(super) graph: Graph,
    /// By the address of the tensor's storage, of which `held` has each: none is given twice while this lasts.
    values: HashMap<usize, ValueId>,
    /// A tensor of each value, without the op behind it.
    pub(super) held: Vec<Tensor>,
    /// Values whose drop was told.
    gone: HashSet<ValueId>,
    /// Named weights and inputs.
    pub(super) sources: HashSet<Source>,
}

thread_local! {
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
    /// Values whose last tensor was dropped since the last event. Apart, as a tensor may be dropped at any time.
    static DROPPED: RefCell<Vec<(u64, ValueId)>> = const { RefCell::new(Vec::new()) };
}

/// Opens a trace on this thread, which lasts as long as what is returned.
///
/// # Errors
/// One is open already.
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
        gone: HashSet::new(),
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

/// The open trace, by its number; `None` while none is open.
pub(crate) fn trace_number() -> Option<u64> {
    SESSION.with_borrow(|session| session.as_ref().map(|session| session.id))
}

/// What the open trace is for; `None` while none is open.
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

/// The outermost autocast region of this thread has ended.
pub(crate) fn autocast_ended() {
    SESSION.with_borrow_mut(|session| {
        if let Some(session) = session {
            session.push(TraceEvent::AutocastEnd);
        }
    });
}

/// Tells the next event that the last tensor of a value was dropped.
pub(super) fn dropped(trace: u64, value: ValueId) {
    // A thread that is ending has no trace.
    let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().push((trace, value)));
}

fn address(x: &Tensor) -> usize {
    let (storage, _) = x.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage) as usize
}

impl Session {
    pub(super) fn push(&mut self, event: TraceEvent) {
        self.told_drops();
        self.graph.events.push(event);
    }

    /// Writes down what has been dropped since the last event.
    pub(super) fn told_drops(&mut self) {
        let mine = DROPPED
            .take()
            .into_iter()
            .filter(|(trace, _)| *trace == self.id);
        for (_, value) in mine {
            self.gone.insert(value);
            self.graph.events.push(TraceEvent::Drop(value));
        }
    }

    fn add(&mut self, x: &Tensor, value: Value) -> ValueId {
        let id = ValueId(self.graph.values.len());
        self.values.insert(address(x), id);
        self.held.push(match x.is_variable() {
            true => x.clone(),
            false => x.detach(), // the storage without the node
        });
        self.graph.values.push(value);
        id
    }

    /// [`add`](Self::add) of what an op has made.
    pub(super) fn add_made(&mut self, x: &Tensor, tracked: bool) {
        let value = Value {
            shape: x.dims().to_vec(),
            dtype: x.dtype(),
            source: Source::Node,
            tracked,
        };
        self.add(x, value);
    }

    /// The value whose elements `x` shows. What was never seen is a weight, an input or a constant.
    pub(super) fn value(&mut self, x: &Tensor) -> Result<ValueId> {
        if let Some(id) = self.values.get(&address(x)).copied() {
            let value = &mut self.graph.values[id.0];
            // Seen first as a detached view of it, for its copy in half precision, say.
            if value.source == Source::Constant && x.is_variable() {
                (value.source, value.tracked) = (Source::Weight(String::new()), true);
                self.held[id.0] = x.clone();
            }
            return Ok(id);
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
                    "a hollow tensor that no op of this trace has made",
                    "candle's copy makes those, and another trace: pass the tensor itself",
                ));
            }
            None if x.is_variable() => Source::Weight(String::new()),
            None | Some(Role::Constant) => Source::Constant,
        };
        if let Source::Input(name) | Source::Weight(name) = &source
            && !name.is_empty()
            && !self.sources.insert(source.clone())
        {
            return Err(twice(name));
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
        // What is read has not gone, whatever its node told.
        if self.gone.remove(&value) {
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

pub(super) fn twice(name: &str) -> Error {
    Error::order(
        "graph::trace",
        format!("{name:?} is the name of two tensors"),
        "name each once; a copy of a hollow tensor cannot be told from it, so take it itself",
    )
}

/// What a traced function returns.
pub trait Outputs {
    /// Its tensors, in order.
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

/// What `f` does, on `target`, without doing it: `f` is called once, its ops check their operands' shapes and dtypes as
/// always, and compute nothing.
///
/// Everything that decides what runs is as `f` and its caller have it: [`autocast`](crate::autocast()) regions,
/// [`no_grad`](crate::no_grad()), the kernel policy. Ops of this crate on real tensors are traced too, and give hollow
/// ones. Token ids are not read, so that ids outside of the vocabulary are not found.
///
/// Drops are told of values that ops make, as they happen: of what the graph of a gradient keeps, when that graph goes.
/// A value that is read after its drop was told (a tensor taken out of its graph outlives it) is never dropped.
///
/// # Errors
/// Those of `f`; a computation by candle itself on a hollow tensor, with the op before it; a trace inside of a trace.
pub fn trace<T: Outputs>(target: Target, f: impl FnOnce() -> Result<T>) -> Result<Graph> {
    Ok(trace_with_tensors(target, f)?.graph)
}

/// A graph, and a tensor of each of its values: of a weight the variable itself, of what ops make a hollow one.
pub(crate) struct Traced {
    pub graph: Graph,
    pub tensors: Vec<Tensor>,
}

/// As [`trace`].
pub(crate) fn trace_with_tensors<T: Outputs>(
    target: Target,
    f: impl FnOnce() -> Result<T>,
) -> Result<Traced> {
    struct Quiet;
    impl Listener for Quiet {}

    let _listening = probe::listen(Arc::new(Quiet)); // ops have paths only while there is a listener
    let _root = probe::at_root(); // wherever this is called from
    let _open = open(target)?;
    let result = f().map_err(explained)?;
    with_session(|session| {
        session.told_drops();
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

/// An error of candle's on a hollow tensor in words of the model: candle names the dtype of an empty storage.
fn explained(error: Error) -> Error {
    let text = error.to_string();
    if !text.contains("F4") && !text.contains("f4") {
        return error;
    }
    let last = with_session(|session| {
        let mut events = session.graph.events.iter().rev();
        Ok(events.find_map(|event| match event {
            TraceEvent::Node(node) => Some(node.path.clone()),
            _ => None,
        }))
    });
    Error::Order {
        op: "graph::trace",
        problem: match last.ok().flatten() {
            Some(path) => format!("after {path}, candle was to compute on a hollow tensor itself"),
            None => "before any op, candle was to compute on a hollow tensor itself".into(),
        },
        hint: "use the op of tallow::ops: add for +, cast for to_dtype, contiguous before reshape, say".into(),
    }
}

/// Calls the weight or input `x` by `name` in the trace that is open: a variable with elements, whose name nothing else
/// knows.
///
/// # Errors
/// No open trace, a name that is another value's, a tensor that an op has made.
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
            return Err(twice(name));
        }
        if is_new {
            session.sources.remove(&session.graph.values[id.0].source);
        }
        session.graph.values[id.0].source = named;
        Ok(())
    })
}
