//! The trace that is open on a thread: values by their storage, and what has happened.

use super::data::{Event, Graph, Kept, Node, Operand, Source, Value, ValueId, View};
use super::hollow::{Role, empty, hollow, hollow_out};
use crate::grad::is_grad_enabled;
use crate::ops::forget_weights;
use crate::ops::record::Spec;
use crate::probe::{self, Listener};
use crate::{Error, Result};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Storage, Tensor, Var};
use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whose kernels the traced function would run: it decides which ops have one. No such device need be there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU of compute capability 8.0 or later.
    Cuda,
}

pub(super) struct Session {
    /// Of this trace alone: a tensor of another may be dropped while it is open.
    id: u64,
    target: Target,
    pub(super) graph: Graph,
    /// By the address of the tensor's storage, of which `held` has each: none is given twice while this lasts.
    values: HashMap<usize, ValueId>,
    /// A tensor of each value, without the op behind it.
    held: Vec<Tensor>,
    /// Values whose drop was told.
    gone: HashSet<ValueId>,
}

thread_local! {
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
    /// Values whose last tensor was dropped since the last event. Apart, as a tensor may be dropped at any time.
    static DROPPED: RefCell<Vec<(u64, ValueId)>> = const { RefCell::new(Vec::new()) };
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

/// Whether a trace is open on this thread.
pub(crate) fn is_tracing() -> bool {
    SESSION.with_borrow(Option::is_some)
}

/// What the open trace is for; `None` while none is open.
pub(crate) fn target() -> Option<Target> {
    SESSION.with_borrow(|session| session.as_ref().map(|session| session.target))
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

    struct Open;
    impl Drop for Open {
        fn drop(&mut self) {
            forget_weights(); // hollow copies
            SESSION.set(None);
            DROPPED.take();
        }
    }

    if is_tracing() {
        return Err(Error::Order {
            op: "graph::trace",
            problem: "a trace is open on this thread already".into(),
            hint: "call the function itself: its ops are traced".into(),
        });
    }
    forget_weights(); // of an open region: real copies, or of another trace
    DROPPED.take();
    let _listening = probe::listen(Arc::new(Quiet)); // ops have paths only while somebody listens
    static NEXT: AtomicU64 = AtomicU64::new(0);
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
    }));
    let _open = Open;
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
        let values = session.graph.values.iter().enumerate();
        if values
            .filter(|(i, _)| *i != id.0)
            .any(|(_, other)| other.source == named)
        {
            return Err(twice(name));
        }
        session.graph.values[id.0].source = named;
        Ok(())
    })
}

fn twice(name: &str) -> Error {
    Error::Order {
        op: "graph::trace",
        problem: format!("{name:?} is the name of two tensors"),
        hint: "name each once; a copy of a hollow tensor cannot be told from it, so take it itself"
            .into(),
    }
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

/// An error of candle's on a hollow tensor in words of the model: candle names the dtype of an empty storage.
fn explained(error: Error) -> Error {
    let text = error.to_string();
    if !text.contains("F4") && !text.contains("f4") {
        return error;
    }
    let last = SESSION.with_borrow(|session| {
        let nodes = session.as_ref().map(|session| &session.graph.events);
        let mut nodes = nodes.into_iter().flatten().rev();
        nodes.find_map(|event| match event {
            Event::Node(node) => Some(node.path.clone()),
            _ => None,
        })
    });
    Error::Order {
        op: "graph::trace",
        problem: match last {
            Some(path) => format!("after {path}, candle was to compute on a hollow tensor itself"),
            None => "before any op, candle was to compute on a hollow tensor itself".into(),
        },
        hint: "use the op of tallow::ops: add for +, cast for to_dtype, contiguous before reshape, say".into(),
    }
}

/// Says that a hollow tensor cannot be computed with, if one of `inputs` is and `error` came of it.
pub(crate) fn refuse_hollow(
    op: &'static str,
    inputs: &[&Tensor],
    error: candle_core::Error,
) -> candle_core::Error {
    match inputs.iter().any(|x| Role::of(x).is_some()) {
        false => error,
        true => Error::Order {
            op,
            problem: "a hollow tensor has no elements to compute with".into(),
            hint: "run it inside of graph::trace, or build the model with weights".into(),
        }
        .into(),
    }
}

fn address(x: &Tensor) -> usize {
    let (storage, _) = x.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage) as usize
}

impl Session {
    pub(super) fn push(&mut self, event: Event) {
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
            self.graph.events.push(Event::Drop(value));
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
                return Err(Error::Order {
                    op: "graph::trace",
                    problem: "a hollow tensor that no op of this trace has made".into(),
                    hint: "candle's copy makes those, and another trace: pass the tensor itself"
                        .into(),
                });
            }
            None if x.is_variable() => Source::Weight(String::new()),
            None | Some(Role::Constant) => Source::Constant,
        };
        let is_named = |other: &&Value| other.source == source;
        if let Source::Input(name) | Source::Weight(name) = &source
            && !name.is_empty()
            && self.graph.values.iter().find(is_named).is_some()
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

    pub(super) fn operand(&mut self, x: &Tensor) -> Result<Operand> {
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
            let its_drop = Event::Drop(value);
            self.graph.events.retain(|event| *event != its_drop);
        }
        let tracked = x.track_op() && self.graph.value(value).tracked;
        Ok(Operand {
            value,
            view,
            tracked,
        })
    }
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
        // A thread that is ending has no trace.
        let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().push((self.trace, self.value)));
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

/// Writes down a call of `op` on `inputs`, and returns its hollow output.
pub(crate) fn record<C: Spec + Send + Sync + 'static>(
    name: &'static str,
    op: C,
    inputs: &[&Tensor],
    composed: bool,
) -> Result<Tensor> {
    let shapes: Vec<probe::Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let (shape, dtype) = op.output(&shapes);
    let kept = op.kept(&shapes);
    let reads = op.reads();
    let on = target().unwrap_or_default();
    let steps = [
        op.forward_steps(&shapes, on),
        op.backward_steps(&shapes, on),
    ];
    let path = probe::op_path(name).to_string();
    with_session(|session| {
        session.told_drops(); // before the operands: what is read has not gone
        let operands = inputs
            .iter()
            .map(|x| session.operand(x))
            .collect::<Result<Vec<_>>>()?;
        let reads = reads
            .iter()
            .map(|x| session.operand(x))
            .collect::<Result<Vec<_>>>()?;
        // By the table too: a hollow output has a node of candle's where a real one has none.
        let tracked = is_grad_enabled() && operands.iter().any(|operand| operand.tracked);
        let tracked = tracked || op.is_tracked();
        let output = ValueId(session.graph.values.len());
        let [forward, backward] = steps;
        let kept_values = kept.iter().enumerate().map(|(i, (name, _, _))| Kept {
            name,
            value: ValueId(output.0 + 1 + i),
        });
        session.push(Event::Node(Node {
            path,
            op: name,
            attributes: op.attributes(),
            composed,
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
            Event::Node(node) if node.output == value => Some(node),
            _ => None,
        });
        let kept = node.and_then(|node| node.kept.iter().find(|kept| kept.name == name));
        Ok(kept.map(|kept| session.held[kept.value.0].clone()))
    })
}

/// The outermost autocast region of this thread has ended.
pub(crate) fn autocast_ended() {
    SESSION.with_borrow_mut(|session| {
        if let Some(session) = session {
            session.push(Event::AutocastEnd);
        }
    });
}
