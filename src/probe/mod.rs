//! What profiling and memory accounting listen to: ranges of work, entered and left, and what ops keep. Free without
//! listeners.
//!
//! What lives here: ranges ([`range`], [`module`], [`phase`], and those that this crate's ops open around themselves),
//! where a thread is ([`Path`], [`current`]), parts of an op's time ([`Parts`]), listeners ([`Listener`], [`listen`]),
//! and the one of NVIDIA's profilers ([`emit_nvtx`]). What does not: clocks, sums and reports; those are
//! [`memory`](crate::memory)'s and [`profile`](crate::profile)'s. Nothing here knows of a device.
//!
//! A range costs one load of an atomic without listeners. Ranges belong to a thread and nest on it:
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use tallow::probe::{self, Event, Listener};
//!
//! #[derive(Default)]
//! struct Names(Mutex<Vec<String>>);
//! impl Listener for Names {
//!     fn entered(&self, event: &Event) {
//!         self.0.lock().unwrap().push(event.path.to_string());
//!     }
//! }
//!
//! let names = Arc::new(Names::default());
//! let listening = probe::listen(names.clone());
//! {
//!     let _outer = probe::range("encoder");
//!     let _inner = probe::module(|| format!("layers.{}", 3));
//! }
//! drop(listening);
//! assert_eq!(*names.0.lock().unwrap(), ["encoder", "encoder/layers.3"]);
//! ```

mod cost;
mod nvtx;
pub(crate) mod parts;
mod path;

pub use cost::Cost;
pub use nvtx::emit_nvtx;
pub use parts::Parts;
pub use path::Path;

use candle_core::{DType, Tensor};
use std::borrow::Cow;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

/// What a range stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A step of training, or of whatever is repeated. Steps are no part of the path, and leave the phase as it is.
    Step,
    /// A part of a step: forward, backward, optimizer. Phases are no part of the path.
    Phase,
    /// A layer, by the name that its weights have.
    Module,
    /// An op of this crate, forward.
    Op,
    /// An op of this crate, backward: its path is where it was run forward.
    OpBackward,
    /// What a user has named.
    Range,
}

/// A range, as it is entered or left.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// What it stands for.
    pub kind: Kind,
    /// Its own name.
    pub name: &'a str,
    /// Where it is, itself included (but for a phase).
    pub path: Path,
    /// The phase that the thread is in; empty if in none.
    pub phase: &'static str,
    /// When.
    pub at: Instant,
    /// What an op has read and written: as it is left, if it succeeded.
    pub operands: Option<Operands<'a>>,
    /// What an op has cost, if it says so itself, as the calls of a plan do: as it is left. Else its operands say it,
    /// by the op's [formula](crate::profile::op_costs).
    pub cost: Option<Cost>,
    /// What of an op's time went where, as far as its kernels tell it: as it is left.
    pub parts: Parts,
    /// Whether it is the thread's innermost range that is left, as it should be.
    pub in_order: bool,
}

/// The operands of an op.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// What it reads, in the op's order.
    pub inputs: &'a [Operand<'a>],
    /// What it has made: forward's output, backward too.
    pub output: Operand<'a>,
}

/// A tensor, as far as what it costs is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand<'a> {
    /// Its shape.
    pub dims: &'a [usize],
    /// The dtype of its elements.
    pub dtype: DType,
}

impl Operand<'_> {
    /// How many rows: elements of all dimensions but the last.
    pub(crate) fn rows(&self) -> usize {
        let leading = self
            .dims
            .split_last()
            .map_or(&[][..], |(_, leading)| leading);
        leading.iter().product()
    }

    /// The dtype that its elements are computed in: f32 for half precision.
    pub(crate) fn wide_dtype(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self {
            dims: tensor.dims(),
            dtype: tensor.dtype(),
        }
    }
}

/// Who is told. Called on the thread that does the work, in the middle of it: be quick, and open no range.
pub trait Listener: Send + Sync {
    /// A range begins.
    fn entered(&self, _event: &Event<'_>) {}
    /// A range ends.
    fn left(&self, _event: &Event<'_>) {}
    /// The op at `path` has made `output`, which the graph may keep.
    fn produced(&self, _path: Path, _output: &Tensor) {}
    /// The op at `path`, whose output is still to come on this thread, keeps `tensor` for backward beside its inputs
    /// and output.
    fn kept(&self, _path: Path, _what: &'static str, _tensor: &Tensor) {}
    /// Whether a GPU may replay recorded work as one launch, of which [`replayed`](Self::replayed) tells. Where a
    /// listener takes none, each op of it is launched in its range.
    fn takes_replays(&self) -> bool {
        false
    }
    /// The thread has replayed recorded work. Ranges of its ops were entered and left since, one after another, and are
    /// the last ones of the range that the thread is in. Each kernel's number says which of `ops` ops it is of, in the
    /// order in which they run.
    fn replayed(&self, _ops: usize, _kernels: &[usize]) {}
}

type Listeners = Vec<(u64, Arc<dyn Listener>)>;

static LISTENERS: RwLock<Listeners> = RwLock::new(Vec::new());
static LISTENING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CURRENT: Cell<Path> = const { Cell::new(Path::ROOT) };
    static PHASE: Cell<&'static str> = const { Cell::new("") };
    /// How many ranges are open.
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// A listener's stay: it is told until this is dropped.
#[must_use = "the listener is told until this is dropped"]
pub struct Listening(u64);

/// Tells `listener` of what happens on all threads from now on.
pub fn listen(listener: Arc<dyn Listener>) -> Listening {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut listeners = LISTENERS.write().unwrap_or_else(PoisonError::into_inner);
    listeners.push((id, listener));
    LISTENING.store(listeners.len(), Ordering::Relaxed);
    Listening(id)
}

impl Drop for Listening {
    fn drop(&mut self) {
        let mut listeners = LISTENERS.write().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|(id, _)| *id != self.0);
        LISTENING.store(listeners.len(), Ordering::Relaxed);
    }
}

/// Whether anybody listens.
#[inline]
pub fn is_listening() -> bool {
    LISTENING.load(Ordering::Relaxed) > 0
}

/// Whether recorded work may be replayed: whoever listens takes it.
#[cfg(feature = "cuda")]
pub(crate) fn takes_replays() -> bool {
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    listeners
        .iter()
        .all(|(_, listener)| listener.takes_replays())
}

/// The thread has replayed the last `ops` ops of the range that it is in; each kernel is of the one with its number.
#[cfg(feature = "cuda")]
pub(crate) fn replayed(ops: usize, kernels: &[usize]) {
    tell(|listener| listener.replayed(ops, kernels));
}

/// Where this thread is.
pub fn current() -> Path {
    CURRENT.get()
}

/// The phase that this thread is in; empty if in none.
pub fn current_phase() -> &'static str {
    PHASE.get()
}

fn tell(f: impl Fn(&dyn Listener)) {
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    listeners.iter().for_each(|(_, listener)| f(&**listener));
}

/// A range that ends when this is dropped.
#[must_use = "the range ends when this is dropped"]
pub struct RangeGuard {
    entered: Option<Entered>,
    /// Ranges are a thread's own.
    thread: PhantomData<*const ()>,
}

struct Entered {
    kind: Kind,
    name: Cow<'static, str>,
    path: Path,
    /// Where the thread was before.
    path_before: Path,
    phase_before: &'static str,
    /// Of an op: what the thread had spent in parts of the one around it.
    parts_before: Option<Parts>,
}

impl RangeGuard {
    const IDLE: Self = Self {
        entered: None,
        thread: PhantomData,
    };

    /// Ends an op's range, and says what it has worked on.
    pub(crate) fn leave(mut self, operands: Operands<'_>) {
        self.end(Some(operands), None);
    }

    /// As [`leave`](Self::leave), with what it has cost.
    pub(crate) fn leave_costing(mut self, operands: Operands<'_>, cost: Cost) {
        self.end(Some(operands), Some(cost));
    }

    /// [`leave`](Self::leave) for an op that has read and overwritten `elements` elements, whatever tensors they are
    /// in.
    pub(crate) fn leave_flat(self, elements: usize, dtype: DType) {
        let operand = Operand {
            dims: &[elements],
            dtype,
        };
        self.leave(Operands {
            inputs: &[operand],
            output: operand,
        });
    }

    fn end(&mut self, operands: Option<Operands<'_>>, cost: Option<Cost>) {
        let Some(entered) = self.entered.take() else {
            return;
        };
        let parts = entered.parts_before.map(parts::end_op);
        let in_order = CURRENT.get() == entered.path;
        let event = Event {
            kind: entered.kind,
            name: &entered.name,
            path: entered.path,
            phase: PHASE.get(),
            at: Instant::now(),
            operands,
            cost,
            parts: parts.unwrap_or_default(),
            in_order,
        };
        tell(|listener| listener.left(&event));
        CURRENT.set(entered.path_before);
        PHASE.set(entered.phase_before);
        OPEN.set(OPEN.get() - 1);
        if OPEN.get() == 0 {
            // Ranges that ended out of order have left the thread where one of them had been.
            CURRENT.set(Path::ROOT);
            PHASE.set("");
        }
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.end(None, None);
    }
}

fn enter(kind: Kind, name: Cow<'static, str>, path: Path, phase: &'static str) -> RangeGuard {
    let entered = Entered {
        kind,
        path,
        path_before: CURRENT.replace(path),
        phase_before: PHASE.replace(phase),
        parts_before: matches!(kind, Kind::Op | Kind::OpBackward).then(parts::begin_op),
        name,
    };
    OPEN.set(OPEN.get() + 1);
    let event = Event {
        kind,
        name: &entered.name,
        path,
        phase,
        at: Instant::now(),
        operands: None,
        cost: None,
        parts: Parts::default(),
        in_order: true,
    };
    tell(|listener| listener.entered(&event));
    RangeGuard {
        entered: Some(entered),
        thread: PhantomData,
    }
}

/// A range of the caller's own, inside of those that this thread is in.
pub fn range(name: impl Into<Cow<'static, str>>) -> RangeGuard {
    if !is_listening() {
        return RangeGuard::IDLE;
    }
    let name = name.into();
    let path = current().child(&name);
    enter(Kind::Range, name, path, PHASE.get())
}

/// A layer's range; its name is made only if there is a listener.
pub fn module<N: Into<Cow<'static, str>>>(name: impl FnOnce() -> N) -> RangeGuard {
    if !is_listening() {
        return RangeGuard::IDLE;
    }
    let name = name().into();
    let path = current().child(&name);
    enter(Kind::Module, name, path, PHASE.get())
}

/// Runs `f` in the range of the layer called `name`.
pub fn in_module<T>(name: &'static str, f: impl FnOnce() -> T) -> T {
    let _range = module(|| name);
    f()
}

/// A part of a step: `forward`, `backward`, `optimizer`. The path stays what it is.
pub fn phase(name: &'static str) -> RangeGuard {
    match is_listening() {
        false => RangeGuard::IDLE,
        true => enter(Kind::Phase, Cow::Borrowed(name), current(), name),
    }
}

/// One of the steps that are repeated; [`Laps`](crate::bench::Laps) and the trainer open it around theirs. Path and
/// phase stay what they are.
pub fn step() -> RangeGuard {
    match is_listening() {
        false => RangeGuard::IDLE,
        true => enter(Kind::Step, Cow::Borrowed("step"), current(), PHASE.get()),
    }
}

/// Where an op called `name` is, if it is run here; the root without listeners.
pub(crate) fn op_path(name: &'static str) -> Path {
    match is_listening() {
        false => Path::ROOT,
        true => current().child(name),
    }
}

/// An op's range, at the path that it had when it was put into the graph.
pub(crate) fn op(kind: Kind, name: &'static str, path: Path) -> RangeGuard {
    if !is_listening() {
        return RangeGuard::IDLE;
    }
    let path = match path {
        Path::ROOT => current().child(name), // put into the graph without listeners
        path => path,
    };
    enter(kind, Cow::Borrowed(name), path, PHASE.get())
}

/// The op at `path` has made `output`.
pub(crate) fn produced(path: Path, output: &Tensor) {
    if is_listening() {
        tell(|listener| listener.produced(path, output));
    }
}

/// The op that this thread is in keeps `tensor` for backward.
pub(crate) fn kept(what: &'static str, tensor: &Tensor) {
    if is_listening() {
        let path = current();
        tell(|listener| listener.kept(path, what, tensor));
    }
}
