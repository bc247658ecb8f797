//! What profiling and memory accounting listen to: ranges of work, entered and left, and what ops keep. Free without
//! listeners.
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

mod nvtx;
pub(crate) mod parts;
mod path;
mod range;

pub use nvtx::emit_nvtx;
pub use parts::{Cost, Parts};
pub use path::Path;
pub use range::{RangeGuard, in_module, module, phase, range, step};
pub(crate) use range::{op, op_path};

use candle_core::{DType, Tensor};
use std::cell::Cell;
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

/// Has this thread be at the root, until what is returned goes.
pub(crate) fn at_root() -> AtRoot {
    AtRoot(CURRENT.replace(Path::ROOT))
}

pub(crate) struct AtRoot(Path);

impl Drop for AtRoot {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// The phase that this thread is in; empty if in none.
pub fn current_phase() -> &'static str {
    PHASE.get()
}

fn tell(f: impl Fn(&dyn Listener)) {
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    listeners.iter().for_each(|(_, listener)| f(&**listener));
}
