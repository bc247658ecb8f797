//! Parallel loops of kernels: work is divided into ranges that depend on the shape alone.

use super::{Real, simd};
use crate::probe::parts::Region;
use candle_core::WithDType;
use rayon::prelude::*;
use std::collections::TryReserveError;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements per task: many enough to hide the cost of starting a task (a few microseconds), few enough to fit a cache.
pub const TASK_ELEMENTS: usize = 16 * 1024;

/// Rows that [`sum_rows`] sums into one partial row. It is fixed, so that the order of additions is.
pub(crate) const BLOCK_ROWS: usize = 32;

/// A slice that several tasks write, each its own elements.
///
/// It is for outputs whose parts are not contiguous (a block of columns, a transposed head), which `chunks_mut` cannot
/// split.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the slice was borrowed exclusively; callers of `range` promise that ranges do not overlap.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows `slice` for writing from several tasks.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: std::marker::PhantomData,
        }
    }

    pub fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// Returns the elements `start..start + len`.
    ///
    /// # Safety
    /// No two tasks may hold overlapping ranges at the same time.
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's promise
    #[inline(always)]
    pub unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        let is_inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{start}+{len} of {}", self.len);
        // SAFETY: inside the borrowed slice; disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// Returns the number of parts of `size` elements, including a shorter last one.
    fn parts(&self, size: usize) -> usize {
        self.len.div_ceil(size)
    }

    /// Returns the elements of part `index`.
    ///
    /// # Safety
    /// No two tasks may hold the same part at the same time, nor parts of different sizes.
    #[allow(clippy::mut_from_ref)] // as in `range`
    #[inline(always)]
    unsafe fn part(&self, index: usize, size: usize) -> &mut [T] {
        let start = index * size;
        // SAFETY: parts of one size do not overlap; the caller promises that each is held once.
        unsafe { self.range(start, size.min(self.len - start)) }
    }
}

/// Returns the number of rows per task, for rows of `width` elements.
fn rows_per_task(width: usize) -> usize {
    (TASK_ELEMENTS / width.max(1)).max(1)
}

/// Calls `f(first_row, rows)` on consecutive groups of whole rows of `out`, in parallel; a row has `width` elements.
pub fn for_rows<T: Send>(out: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if width == 0 || out.is_empty() {
        return; // without rows, a task must not allocate scratch for one: the width may exceed memory
    }
    debug_assert_eq!(out.len() % width, 0);
    let rows = rows_per_task(width);
    let (out, size) = (Shared::new(out), rows * width);
    for_tasks(out.parts(size), |task| {
        // SAFETY: only this task has part `task`.
        let part = unsafe { out.part(task, size) };
        f(task * rows, part);
    });
}

/// Runs [`for_rows`] with a second output of `second_width` elements per row, divided at the same rows.
pub fn for_rows2<T: Send, U: Send>(
    first: &mut [T],
    width: usize,
    second: &mut [U],
    second_width: usize,
    f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    if width == 0 || second_width == 0 {
        return;
    }
    assert_eq!(first.len() / width, second.len() / second_width);
    let rows = rows_per_task(width);
    let (first, size) = (Shared::new(first), rows * width);
    let (second, second_size) = (Shared::new(second), rows * second_width);
    for_tasks(first.parts(size), |task| {
        // SAFETY: only this task has part `task` of each.
        let (a, b) = unsafe { (first.part(task, size), second.part(task, second_size)) };
        f(task * rows, a, b);
    });
}

/// Calls `f(task)` for every task in `0..tasks`, in parallel.
pub fn for_tasks(tasks: usize, f: impl Fn(usize) + Sync) {
    run(tasks, usize::MAX, &f);
}

/// Runs `f(task)` for every task in `0..tasks`, in pieces of at most `piece` consecutive tasks.
///
/// It is deliberately not generic: rayon's code is compiled once instead of once per kernel and type.
fn run(tasks: usize, piece: usize, f: &(dyn Fn(usize) + Sync)) {
    if tasks == 1 {
        return f(0); // on this thread, whatever the pool
    }
    let each = |f: &(dyn Fn(usize) + Sync)| {
        (0..tasks).into_par_iter().with_max_len(piece).for_each(f);
    };
    match Region::begin() {
        None => each(f),
        Some(region) => {
            each(&|task| region.task(|| f(task)));
            region.end();
        }
    }
}

/// Calls `f(scratch, task)` for every task in `0..tasks`, in parallel, with one scratch per thread. Threads take the
/// next task as they become free. The result of a task must not depend on what is left in its scratch.
pub fn for_tasks_with<S>(
    tasks: usize,
    scratch_of: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, usize) + Sync,
) {
    let workers = tasks.min(rayon::current_num_threads());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut scratch = None;
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            f(scratch.get_or_insert_with(&scratch_of), task);
        }
    };
    run(workers, 1, &|_| work());
}

/// Computes `out[j] = sum over rows of term(row)[j]`, or adds it to `out` if `adds`. `add(rows, partial)` adds the
/// terms of some rows, in order, to `partial`.
///
/// Blocks of a fixed number of rows are summed separately, then the blocks are added in order. So the bits do not
/// depend on the number of threads, and rounding chains are shorter than in a plain loop.
pub fn sum_rows<T: Real>(
    out: &mut [T],
    rows: usize,
    adds: bool,
    add: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let width = out.len();
    let blocks = rows.div_ceil(BLOCK_ROWS);
    let mut partials = vec![T::ZERO; blocks * width]; // (blocks, width)
    let shared = Shared::new(&mut partials);
    for_tasks(shared.parts(width.max(1)), |block| {
        let rows = block * BLOCK_ROWS..rows.min((block + 1) * BLOCK_ROWS);
        // SAFETY: only this task has part `block`.
        add(rows, unsafe { shared.part(block, width) });
    });
    if !adds {
        out.fill(T::ZERO);
    }
    simd::vectorized(
        #[inline(always)]
        || {
            for partial in partials.chunks_exact(width.max(1)) {
                for (o, p) in out.iter_mut().zip(partial) {
                    *o += *p;
                }
            }
        },
    );
}

/// Returns the number of elements that [`sum_rows`] allocates for its blocks.
pub(crate) fn block_sums(rows: usize, width: usize) -> f64 {
    rows.div_ceil(BLOCK_ROWS) as f64 * width as f64
}

/// Returns the sum of `f(range)` over consecutive ranges of [`TASK_ELEMENTS`] that cover `0..n`. The results of the
/// ranges are added in order.
pub fn sum_ranges(n: usize, f: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let mut partials = vec![0.0; n.div_ceil(TASK_ELEMENTS)];
    let shared = Shared::new(&mut partials);
    for_tasks(shared.parts(1), |task| {
        let range = task * TASK_ELEMENTS..n.min((task + 1) * TASK_ELEMENTS);
        // SAFETY: only this task has part `task`.
        let sum = unsafe { shared.part(task, 1) };
        sum[0] = f(range);
    });
    partials.iter().sum()
}

/// Returns a vector of `len` numbers that `fill` writes completely, without zeroing it first.
///
/// # Errors
/// An allocation that fails.
pub fn filled<T: WithDType>(
    len: usize,
    fill: impl FnOnce(&mut [T]),
) -> Result<Vec<T>, TryReserveError> {
    let mut out = Vec::new();
    out.try_reserve_exact(len)?;
    // SAFETY: the capacity suffices, every bit pattern is a valid T, and `fill` (a kernel) writes every element without
    // reading it.
    unsafe {
        fill(std::slice::from_raw_parts_mut(out.as_mut_ptr(), len));
        out.set_len(len);
    }
    Ok(out)
}
