//! What work costs, and what of an op's time its matrix products take, and what its softmax.
//!
//! CPU kernels run their products and softmaxes through [`timed`]. The calling thread adds up what it spends there, and
//! an op's range takes the sums as it ends. What tasks of a parallel loop spend is scaled to the loop's wall time
//! ([`Region`]): of so many nanoseconds of all threads together, products took that share. Without a listener all of
//! this is one load of an atomic for each product and loop.

use super::is_listening;
use std::cell::Cell;
use std::ops::{Add, AddAssign};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Parts of an op's time. What is in none of them is the rest: masks are a part of the softmax, but where a mask is an
/// op of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// In matrix products, the packing of their factors included.
    pub products_ns: u64,
    /// Of these in attention's scores, q k^T, and the gradients of q and k.
    pub scores_ns: u64,
    /// Of these in what attention multiplies values with, p v, and the gradients of p and v.
    pub values_ns: u64,
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

    pub(crate) fn scaled(self, numerator: u64, denominator: u64) -> Self {
        let scale = |ns: u64| {
            let scaled = u128::from(ns) * u128::from(numerator) / u128::from(denominator.max(1));
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        self.with(self, |ns, _| scale(ns))
    }

    fn with(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            products_ns: f(self.products_ns, other.products_ns),
            scores_ns: f(self.scores_ns, other.scores_ns),
            values_ns: f(self.values_ns, other.values_ns),
            softmax_ns: f(self.softmax_ns, other.softmax_ns),
            fused_ns: f(self.fused_ns, other.fused_ns),
        }
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        *self = self.with(other, |a, b| a + b);
    }
}

/// One of the parts that CPU kernels tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A product of attention's scores, or of the gradients through it.
    Scores,
    /// A product with attention's values, or of the gradients through it.
    Values,
    /// Any other product.
    Products,
    Softmax,
}

impl Part {
    fn of(self, ns: u64) -> Parts {
        let mut parts = Parts::default();
        match self {
            Self::Scores => parts.scores_ns = ns,
            Self::Values => parts.values_ns = ns,
            Self::Products => {}
            Self::Softmax => parts.softmax_ns = ns,
        }
        if self != Self::Softmax {
            parts.products_ns = ns;
        }
        parts
    }
}

thread_local! {
    /// What this thread has spent in parts since the innermost op began, or the task of a region.
    static SPENT: Cell<Parts> = Cell::default();
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

/// A parallel loop, outside of any part, while there is a listener.
pub(crate) struct Region {
    start: Instant,
    /// What its tasks have taken, all threads together, and the parts of that.
    taken: Mutex<(u64, Parts)>,
}

impl Region {
    /// `None` without a listener, or if the loop belongs to a part as a whole.
    #[inline]
    pub(crate) fn begin() -> Option<Self> {
        (is_listening() && !IN_PART.get()).then(|| Self {
            start: Instant::now(),
            taken: Mutex::new((0, Parts::default())),
        })
    }

    pub(crate) fn task(&self, work: impl FnOnce()) {
        // A thread that waits may have taken the task while it was in a part of another loop.
        let (spent, in_part) = (SPENT.take(), IN_PART.replace(false));
        let start = Instant::now();
        work();
        let busy_ns = since(start);
        IN_PART.set(in_part);
        let parts = SPENT.replace(spent);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.0 += busy_ns;
        taken.1 += parts;
    }

    /// All tasks are done: their parts are this thread's, scaled to the loop's wall time.
    pub(crate) fn end(self) {
        let taken = self.taken.into_inner();
        let (busy_ns, parts) = taken.unwrap_or_else(PoisonError::into_inner);
        add(parts.scaled(since(self.start), busy_ns));
    }
}

/// FLOPs and bytes of one call of an op, or of several together.
///
/// The model's work, whatever computes it, as [`flops`](crate::model::flops) counts it: a causal mask saves nothing,
/// and what flash attention computes twice counts once. Bytes are the least that must move: every tensor read once and
/// written once, what forward keeps for backward included, caches and second passes not. So a rate over the memory's
/// own says that the tensors were still in cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// 2 for each multiply-add of the matrix products.
    pub product_flops: f64,
    /// Everything else, an exponential, a root and a division counting 1.
    pub other_flops: f64,
    /// The FLOPs among `other_flops` that belong to softmax, its scale and its mask.
    pub softmax_flops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
}

impl Cost {
    /// All FLOPs.
    pub fn flops(&self) -> f64 {
        self.product_flops + self.other_flops
    }

    /// All bytes.
    pub fn bytes(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            product_flops: self.product_flops + other.product_flops,
            other_flops: self.other_flops + other.other_flops,
            softmax_flops: self.softmax_flops + other.softmax_flops,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
