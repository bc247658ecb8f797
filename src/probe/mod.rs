//! Instrumentation for profiling and memory accounting: ranges of work, and the operands and costs of ops.
//!
//! [`profile`](crate::profile) and [`memory::record_on`](crate::memory::record_on()) listen to these ranges.
//! `profile::step`, `profile::phase` and `profile::range` are [`step`], [`phase`] and [`range()`] of this module.
//!
//! Without listeners a range costs one atomic load. Ranges belong to a thread and nest on it:
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use tallow::probe::{self, Event, Listener};
//!
//! #[derive(Default)]
//! struct Names(Mutex<Vec<String>>);
//! impl Listener for Names {
//!     fn on_enter(&self, event: &Event) {
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

/// The kind of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A training step, or another unit of work that repeats. Steps are not part of the path and do not change the
    /// phase.
    Step,
    /// A part of a step: forward, backward, optimizer. Phases are not part of the path.
    Phase,
    /// A layer, under the name of its weights.
    Module,
    /// An op of this crate, forward.
    Op,
    /// An op of this crate, backward; its path is that of its forward.
    OpBackward,
    /// A range named by a user.
    Range,
}

/// The begin or end of a range.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The kind of range.
    pub kind: Kind,
    /// Its own name.
    pub name: &'a str,
    /// Its place, itself included (except for steps and phases).
    pub path: Path,
    /// The phase that the thread is in; empty if none.
    pub phase: &'static str,
    /// The time of the event.
    pub at: Instant,
    /// Operands of an op, at its end if it succeeded.
    pub operands: Option<Operands<'a>>,
    /// Cost of an op at its end, if it reports one, as the calls of a plan do. Otherwise the op's
    /// [formula](crate::profile::op_costs) gives it from the operands.
    pub cost: Option<Cost>,
    /// Parts of an op's time at its end, as its CPU kernels reported them.
    pub parts: Parts,
    /// Whether the range that ends is the thread's innermost one, as it should be.
    pub in_order: bool,
}

/// The operands of an op.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Its inputs, in the op's order.
    pub inputs: &'a [Operand<'a>],
    /// Its output in forward, also for a backward.
    pub output: Operand<'a>,
}

/// Shape and dtype of a tensor, which determine its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand<'a> {
    /// Size of each dimension.
    pub dims: &'a [usize],
    /// Dtype of the elements.
    pub dtype: DType,
}

impl Operand<'_> {
    /// Returns the number of rows: the product of all dimensions but the last.
    pub(crate) fn rows(&self) -> usize {
        let leading = self
            .dims
            .split_last()
            .map_or(&[][..], |(_, leading)| leading);
        leading.iter().product()
    }

    /// Returns the dtype that the elements are computed in: f32 for half precision.
    pub(crate) fn wide_dtype(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }
}

/// Returns the dtype in which a call multiplies, from the dtypes of its operands: half precision if one has it, f64 if
/// all floats have it, else f32.
pub(crate) fn compute_dtype(dtypes: impl Iterator<Item = DType>) -> DType {
    let floats: Vec<DType> = dtypes.filter(DType::is_float).collect();
    let half = |dtype: &&DType| matches!(dtype, DType::BF16 | DType::F16);
    match floats.iter().find(half) {
        Some(half) => *half,
        None if !floats.is_empty() && floats.iter().all(|dtype| *dtype == DType::F64) => DType::F64,
        None => DType::F32,
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

/// A receiver of events. It is called on the working thread in the middle of the work: return quickly, and open no
/// ranges.
pub trait Listener: Send + Sync {
    /// Called when a range begins.
    fn on_enter(&self, _event: &Event<'_>) {}
    /// Called when a range ends.
    fn on_leave(&self, _event: &Event<'_>) {}
    /// Returns whether a GPU may replay recorded work in one launch and report it with [`on_replay`](Self::on_replay).
    /// If any listener returns false, each op is launched in its range.
    fn accepts_replays(&self) -> bool {
        false
    }
    /// Called when the thread has replayed recorded work of `ops` ops. The ranges of these ops were entered and left
    /// before, one after another, and are the last ones in the thread's current range. `kernels` has the index of each
    /// kernel's op, in the order in which the kernels run.
    fn on_replay(&self, _ops: usize, _kernels: &[usize]) {}
}

type Listeners = Vec<(u64, Arc<dyn Listener>)>;

static LISTENERS: RwLock<Listeners> = RwLock::new(Vec::new());
static LISTENING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CURRENT: Cell<Path> = const { Cell::new(Path::ROOT) };
    static PHASE: Cell<&'static str> = const { Cell::new("") };
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// Guard: the listener is called until this is dropped.
#[must_use = "the listener is called until this is dropped"]
pub struct ListenerGuard(u64);

/// Calls `listener` for the events of all threads from now on.
///
/// The [module](self) has an example.
pub fn listen(listener: Arc<dyn Listener>) -> ListenerGuard {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut listeners = LISTENERS.write().unwrap_or_else(PoisonError::into_inner);
    listeners.push((id, listener));
    LISTENING.store(listeners.len(), Ordering::Relaxed);
    ListenerGuard(id)
}

impl Drop for ListenerGuard {
    fn drop(&mut self) {
        let mut listeners = LISTENERS.write().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|(id, _)| *id != self.0);
        LISTENING.store(listeners.len(), Ordering::Relaxed);
    }
}

/// Returns whether there is a listener.
///
/// ```
/// use std::sync::Arc;
/// use tallow::probe::{self, Listener};
///
/// struct Silent;
/// impl Listener for Silent {}
///
/// assert!(!probe::is_listening());
/// let listening = probe::listen(Arc::new(Silent));
/// assert!(probe::is_listening());
/// drop(listening);
/// assert!(!probe::is_listening());
/// ```
#[inline]
pub fn is_listening() -> bool {
    LISTENING.load(Ordering::Relaxed) > 0
}

/// Returns whether recorded work may be replayed: all listeners accept it.
#[cfg(feature = "cuda")]
pub(crate) fn accepts_replays() -> bool {
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    listeners
        .iter()
        .all(|(_, listener)| listener.accepts_replays())
}

/// Reports a replay of the last `ops` ops of the thread's current range; `kernels` has the index of each kernel's op.
#[cfg(feature = "cuda")]
pub(crate) fn report_replay(ops: usize, kernels: &[usize]) {
    notify(|listener| listener.on_replay(ops, kernels));
}

/// Returns this thread's current path.
///
/// Ranges are entered only while there is a listener:
///
/// ```
/// use std::sync::Arc;
/// use tallow::probe::{self, Listener, Path};
///
/// struct Silent;
/// impl Listener for Silent {}
///
/// let _listening = probe::listen(Arc::new(Silent));
/// assert_eq!(probe::current(), Path::ROOT);
/// let _range = probe::range("encoder");
/// assert_eq!(probe::current().to_string(), "encoder");
/// ```
pub fn current() -> Path {
    CURRENT.get()
}

/// Sets this thread's path to the root until the returned guard is dropped.
pub(crate) fn at_root() -> AtRoot {
    AtRoot(CURRENT.replace(Path::ROOT))
}

pub(crate) struct AtRoot(Path);

impl Drop for AtRoot {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// Returns this thread's current phase; empty if none.
///
/// [`phase`] has an example.
pub fn current_phase() -> &'static str {
    PHASE.get()
}

fn notify(f: impl Fn(&dyn Listener)) {
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    listeners.iter().for_each(|(_, listener)| f(&**listener));
}
