//! Guards that enter and leave ranges of work on a thread.

use super::parts::{self, Parts};
use super::{
    CURRENT, Cost, Event, Kind, OPEN, Operand, Operands, PHASE, Path, current, is_listening, notify,
};
use candle_core::DType;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::time::Instant;

/// A range that ends when this is dropped.
#[must_use = "the range ends when this is dropped"]
pub struct RangeGuard {
    entered: Option<Entered>,
    /// Makes the guard `!Send`: a range belongs to its thread.
    thread: PhantomData<*const ()>,
}

struct Entered {
    kind: Kind,
    name: Cow<'static, str>,
    path: Path,
    path_before: Path,
    phase_before: &'static str,
    /// For an op: the sums of the parts of the op around it.
    parts_before: Option<Parts>,
}

impl RangeGuard {
    const IDLE: Self = Self {
        entered: None,
        thread: PhantomData,
    };

    pub(crate) fn leave(mut self, operands: Operands<'_>) {
        self.end(Some(operands), None);
    }

    /// Ends the range as [`leave`](Self::leave) does, and reports its cost.
    pub(crate) fn leave_costing(mut self, operands: Operands<'_>, cost: Cost) {
        self.end(Some(operands), Some(cost));
    }

    /// Ends the range of an op that has read and overwritten `elements` elements, in whatever tensors.
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
        notify(|listener| listener.on_leave(&event));
        CURRENT.set(entered.path_before);
        PHASE.set(entered.phase_before);
        OPEN.set(OPEN.get() - 1);
        if OPEN.get() == 0 {
            // Ranges that ended out of order may have restored the wrong path.
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

/// Enters a range. Name, path and phase are made only if there is a listener.
#[inline]
fn enter(kind: Kind, at: impl FnOnce() -> (Cow<'static, str>, Path, &'static str)) -> RangeGuard {
    if !is_listening() {
        return RangeGuard::IDLE;
    }
    let (name, path, phase) = at();
    begin(kind, name, path, phase)
}

fn begin(kind: Kind, name: Cow<'static, str>, path: Path, phase: &'static str) -> RangeGuard {
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
    notify(|listener| listener.on_enter(&event));
    RangeGuard {
        entered: Some(entered),
        thread: PhantomData,
    }
}

/// Opens a user's range inside of this thread's current ranges.
///
/// The [module](super) has an example.
pub fn range(name: impl Into<Cow<'static, str>>) -> RangeGuard {
    enter(Kind::Range, || named(name.into()))
}

/// Opens a layer's range; its name is made only if there is a listener.
///
/// ```
/// use std::cell::Cell;
/// use tallow::probe;
///
/// let is_made = Cell::new(false);
/// let name = |layer: usize| {
///     is_made.set(true);
///     format!("layers.{layer}")
/// };
/// let _range = probe::module(|| name(3));
/// assert!(!is_made.get()); // nobody listens
/// ```
pub fn module<N: Into<Cow<'static, str>>>(name: impl FnOnce() -> N) -> RangeGuard {
    enter(Kind::Module, || named(name().into()))
}

fn named(name: Cow<'static, str>) -> (Cow<'static, str>, Path, &'static str) {
    let path = current().child(&name);
    (name, path, PHASE.get())
}

/// Runs `f` in the range of the layer called `name`.
///
/// ```
/// use std::sync::Arc;
/// use tallow::probe::{self, Listener};
///
/// struct Silent;
/// impl Listener for Silent {}
///
/// let _listening = probe::listen(Arc::new(Silent));
/// let path = probe::in_module("attn", || probe::in_module("q_proj", probe::current));
/// assert_eq!(path.to_string(), "attn/q_proj");
/// ```
pub fn in_module<T>(name: &'static str, f: impl FnOnce() -> T) -> T {
    let _range = module(|| name);
    f()
}

/// Opens a part of a step. The path is unchanged.
///
/// Any name is allowed. But recorded memory is divided into activations, gradients, optimizer state and scratch only in
/// `forward`, `backward` and `optimizer`.
///
/// ```
/// use std::sync::Arc;
/// use tallow::probe::{self, Listener};
///
/// struct Silent;
/// impl Listener for Silent {}
///
/// let _listening = probe::listen(Arc::new(Silent));
/// {
///     let _phase = probe::phase("forward");
///     assert_eq!(probe::current_phase(), "forward");
/// }
/// assert_eq!(probe::current_phase(), "");
/// ```
pub fn phase(name: &'static str) -> RangeGuard {
    enter(Kind::Phase, || (name.into(), current(), name))
}

/// Opens a step of a loop. Path and phase are unchanged.
///
/// [`Trainer::step`](crate::train::Trainer::step) and the benchmarks open it themselves: their steps need no mark.
///
/// [`profile`](crate::profile) has an example of a loop with steps and phases.
pub fn step() -> RangeGuard {
    enter(Kind::Step, || ("step".into(), current(), PHASE.get()))
}

/// Returns the path of an op called `name` if it is run here; the root without listeners.
pub(crate) fn op_path(name: &'static str) -> Path {
    match is_listening() {
        false => Path::ROOT,
        true => current().child(name),
    }
}

/// Opens an op's range, at the path that it had when it was put into the graph.
pub(crate) fn op(kind: Kind, name: &'static str, path: Path) -> RangeGuard {
    enter(kind, || match path {
        Path::ROOT => named(name.into()), // put into the graph without listeners
        path => (name.into(), path, PHASE.get()),
    })
}
