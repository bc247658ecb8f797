//! What of an op's time its matrix products take, and what its softmax.
//!
//! CPU kernels run their products and softmaxes through [`timed`]. The calling thread adds up what it spends there, and
//! an op's range takes the sums as it ends. What tasks of a parallel loop spend is scaled to the loop's wall time
//! ([`Region`]): of so many nanoseconds of all threads together, products took that share. Without a listener all of
//! this is one load of an atomic for each product and loop.

use super::is_listening;
use std::cell::Cell;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Parts of an op's time. What is in none of them is the rest: masks are a part of the softmax, but where a mask is an
/// op of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// In matrix products, the packing of their factors included.
    pub products_ns: u64,
    /// In softmax and its gradient, scale and mask included.
    pub softmax_ns: u64,
    /// In GPU kernels that do both and cannot be told apart, as flash attention's.
    pub fused_ns: u64,
}

impl Parts {
    /// All parts together.
    pub fn sum_ns(&self) -> u64 {
        self.products_ns + self.softmax_ns + self.fused_ns
    }

    /// Each part times `numerator / denominator`.
    pub(crate) fn scaled(self, numerator: u64, denominator: u64) -> Self {
        let scale = |ns: u64| {
            let scaled = u128::from(ns) * u128::from(numerator) / u128::from(denominator.max(1));
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        Self {
            products_ns: scale(self.products_ns),
            softmax_ns: scale(self.softmax_ns),
            fused_ns: scale(self.fused_ns),
        }
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        self.products_ns += other.products_ns;
        self.softmax_ns += other.softmax_ns;
        self.fused_ns += other.fused_ns;
    }
}

/// One of the parts that CPU kernels tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Products,
    Softmax,
}

impl Part {
    fn of(self, ns: u64) -> Parts {
        match self {
            Self::Products => Parts {
                products_ns: ns,
                ..Default::default()
            },
            Self::Softmax => Parts {
                softmax_ns: ns,
                ..Default::default()
            },
        }
    }
}

thread_local! {
    /// What this thread has spent in parts since the innermost op began, or the task of a region.
    static SPENT: Cell<Parts> = const { Cell::new(Parts { products_ns: 0, softmax_ns: 0, fused_ns: 0 }) };
    /// Whether this thread is in a part: what is inside of one is counted as that.
    static IN_PART: Cell<bool> = const { Cell::new(false) };
}

fn add(parts: Parts) {
    let mut spent = SPENT.get();
    spent += parts;
    SPENT.set(spent);
}

fn since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Runs `work` as a part of the op that this thread is in, or works for.
#[inline]
pub(crate) fn timed<T>(part: Part, work: impl FnOnce() -> T) -> T {
    let start = is_listening().then(begin_part).flatten();
    let result = work();
    if let Some(start) = start {
        end_part(part, start);
    }
    result
}

fn begin_part() -> Option<Instant> {
    (!IN_PART.replace(true)).then(Instant::now)
}

fn end_part(part: Part, start: Instant) {
    add(part.of(since(start)));
    IN_PART.set(false);
}

/// An op begins: what was spent before it, for [`end_op`].
pub(super) fn begin_op() -> Parts {
    SPENT.take()
}

/// An op ends: what was spent in it, without ops inside of it.
pub(super) fn end_op(before: Parts) -> Parts {
    SPENT.replace(before)
}

/// A parallel loop, outside of any part, while somebody listens.
pub(crate) struct Region {
    start: Instant,
    /// In tasks, by all threads together.
    busy_ns: AtomicU64,
    products_ns: AtomicU64,
    softmax_ns: AtomicU64,
}

impl Region {
    /// `None` if nobody listens, or the loop belongs to a part as a whole.
    #[inline]
    pub(crate) fn begin() -> Option<Self> {
        (is_listening() && !IN_PART.get()).then(|| Self {
            start: Instant::now(),
            busy_ns: AtomicU64::new(0),
            products_ns: AtomicU64::new(0),
            softmax_ns: AtomicU64::new(0),
        })
    }

    /// Runs one of the loop's tasks.
    pub(crate) fn task(&self, work: impl FnOnce()) {
        // A thread that waits may have taken the task while it was in a part of another loop.
        let (spent, in_part) = (SPENT.take(), IN_PART.replace(false));
        let start = Instant::now();
        work();
        self.busy_ns.fetch_add(since(start), Relaxed);
        IN_PART.set(in_part);
        let parts = SPENT.replace(spent);
        self.products_ns.fetch_add(parts.products_ns, Relaxed);
        self.softmax_ns.fetch_add(parts.softmax_ns, Relaxed);
    }

    /// All tasks are done: their parts are this thread's, scaled to the loop's wall time.
    pub(crate) fn end(self) {
        let parts = Parts {
            products_ns: self.products_ns.into_inner(),
            softmax_ns: self.softmax_ns.into_inner(),
            fused_ns: 0,
        };
        add(parts.scaled(since(self.start), self.busy_ns.into_inner()));
    }
}
