//! Ranges of work on a thread.

use super::parts::{self, Parts};
use super::{
    CURRENT, Cost, Event, Kind, OPEN, Operand, Operands, PHASE, Path, current, is_listening, tell,
};
use candle_core::DType;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::time::Instant;

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

/// A range with its name, path and phase, which are made only if there is a listener.
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
    tell(|listener| listener.entered(&event));
    RangeGuard {
        entered: Some(entered),
        thread: PhantomData,
    }
}

/// A range of the caller's own, inside of those that this thread is in.
pub fn range(name: impl Into<Cow<'static, str>>) -> RangeGuard {
    enter(Kind::Range, || named(name.into()))
}

/// A layer's range; its name is made only if there is a listener.
pub fn module<N: Into<Cow<'static, str>>>(name: impl FnOnce() -> N) -> RangeGuard {
    enter(Kind::Module, || named(name().into()))
}

fn named(name: Cow<'static, str>) -> (Cow<'static, str>, Path, &'static str) {
    let path = current().child(&name);
    (name, path, PHASE.get())
}

/// Runs `f` in the range of the layer called `name`.
pub fn in_module<T>(name: &'static str, f: impl FnOnce() -> T) -> T {
    let _range = module(|| name);
    f()
}

/// A part of a step: `forward`, `backward`, `optimizer`. The path stays what it is.
pub fn phase(name: &'static str) -> RangeGuard {
    enter(Kind::Phase, || (name.into(), current(), name))
}

/// One of the steps that are repeated. Benchmarks and the trainer open it around theirs. Path and phase stay what they
/// are.
pub fn step() -> RangeGuard {
    enter(Kind::Step, || ("step".into(), current(), PHASE.get()))
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
    enter(kind, || match path {
        Path::ROOT => named(name.into()), // put into the graph without listeners
        path => (name.into(), path, PHASE.get()),
    })
}
