//! The cost of ops, and the parts of an op's time: matmuls and softmax.
//!
//! CPU kernels run their matmuls and softmaxes through [`timed`]. The calling thread sums the time, and an op's range
//! takes the sums when it ends. Time spent by the tasks of a parallel loop is scaled to the loop's wall time
//! ([`Region`]): the share of matmuls in the time of all threads becomes their share of the wall time. Without a
//! listener this costs one atomic load for each matmul and loop.

use super::is_listening;
use std::cell::Cell;
use std::ops::{Add, AddAssign};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Parts of an op's time; the rest is in none of them. Scale and mask count as softmax, unless they are ops of their
/// own, as in references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Time in matmuls, the packing of their operands included.
    pub matmul_ns: u64,
    /// The part of `matmul_ns` in attention's scores, q k^T, and in the gradients of q and k.
    pub scores_ns: u64,
    /// The part of `matmul_ns` in attention's matmul with values, p v, and in the gradients of p and v.
    pub values_ns: u64,
    /// Time in softmax and its gradient, scale and mask included.
    pub softmax_ns: u64,
    /// Time in GPU kernels that fuse matmuls and softmax, such as flash attention's.
    pub attention_ns: u64,
}

impl Parts {
    /// Returns the sum of all parts.
    pub fn sum_ns(&self) -> u64 {
        self.matmul_ns + self.softmax_ns + self.attention_ns
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
            matmul_ns: f(self.matmul_ns, other.matmul_ns),
            scores_ns: f(self.scores_ns, other.scores_ns),
            values_ns: f(self.values_ns, other.values_ns),
            softmax_ns: f(self.softmax_ns, other.softmax_ns),
            attention_ns: f(self.attention_ns, other.attention_ns),
        }
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        *self = self.with(other, |a, b| a + b);
    }
}

/// A part that CPU kernels time separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The matmul of attention's scores, or of the gradients through it.
    Scores,
    /// The matmul with attention's values, or of the gradients through it.
    Values,
    /// Any other matmul.
    Matmul,
    Softmax,
}

impl Part {
    fn of(self, ns: u64) -> Parts {
        let mut parts = Parts::default();
        match self {
            Self::Scores => parts.scores_ns = ns,
            Self::Values => parts.values_ns = ns,
            Self::Matmul => {}
            Self::Softmax => parts.softmax_ns = ns,
        }
        if self != Self::Softmax {
            parts.matmul_ns = ns;
        }
        parts
    }
}

thread_local! {
    /// Time that this thread has spent in parts since the begin of the innermost op, or of a region's task.
    static SPENT: Cell<Parts> = Cell::default();
    /// Whether this thread is in a part; nested parts count as the outer one.
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

/// Begins an op; returns the outer op's sums so far, for [`end_op`].
pub(super) fn begin_op() -> Parts {
    SPENT.take()
}

/// Ends an op and returns its sums, without those of ops inside of it.
pub(super) fn end_op(before: Parts) -> Parts {
    SPENT.replace(before)
}

/// A parallel loop outside of any part, while there is a listener.
pub(crate) struct Region {
    start: Instant,
    /// The time of its tasks, summed over all threads, and the parts of it.
    taken: Mutex<(u64, Parts)>,
}

impl Region {
    /// Begins a region; `None` without a listener, or if the whole loop is inside a part.
    #[inline]
    pub(crate) fn begin() -> Option<Self> {
        (is_listening() && !IN_PART.get()).then(|| Self {
            start: Instant::now(),
            taken: Mutex::new((0, Parts::default())),
        })
    }

    pub(crate) fn task(&self, work: impl FnOnce()) {
        // A thread that waits in a part of another loop may have stolen this task.
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

    /// Ends the region: adds its tasks' parts, scaled to the loop's wall time, to this thread's.
    pub(crate) fn end(self) {
        let taken = self.taken.into_inner();
        let (busy_ns, parts) = taken.unwrap_or_else(PoisonError::into_inner);
        add(parts.scaled(since(self.start), busy_ns));
    }
}

/// FLOPs and bytes of one call of an op, or of several calls together.
///
/// FLOPs are the model's, independent of the implementation, as [`flops`](crate::model::flops) counts them: hidden
/// scores, such as those of a causal mask, are counted, and scores that flash attention recomputes in backward are not
/// counted again. Bytes are the least that must move: every input
/// is read once and every output written once, including what forward saves for backward; caches and second passes do
/// not count. A rate above the memory's bandwidth means that tensors were still in cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// FLOPs of matmuls, 2 for each multiply-add.
    pub matmul_flops: f64,
    /// All other FLOPs; an exponential, a root or a division counts 1.
    pub other_flops: f64,
    /// The FLOPs among `other_flops` that belong to softmax, its scale and its mask.
    pub softmax_flops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
}

impl Cost {
    /// Returns all FLOPs.
    pub fn flops(&self) -> f64 {
        self.matmul_flops + self.other_flops
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }

    /// Returns the time of its matmul FLOPs or of its bytes at these rates per second, whichever is longer, in seconds.
    pub(crate) fn least_seconds(&self, matmul_flops: f64, memory_bytes: f64) -> f64 {
        (self.matmul_flops / matmul_flops).max(self.bytes() / memory_bytes)
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            matmul_flops: self.matmul_flops + other.matmul_flops,
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
