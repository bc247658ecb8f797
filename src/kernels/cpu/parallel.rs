//! How kernels share work among threads: by ranges that depend on the shape alone.

use super::{Real, simd};
use crate::probe::parts::Region;
use candle_core::WithDType;
use rayon::prelude::*;
use std::collections::TryReserveError;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements in one task: large against the cost of handing a task over (a few microseconds), small against a cache.
pub const TASK_ELEMENTS: usize = 16 * 1024;

/// Rows summed into one partial row by [`sum_rows`]. Fixed, so that the order of additions is.
pub(crate) const BLOCK_ROWS: usize = 32;

/// A slice that several tasks write, each to places of its own.
///
/// For outputs whose parts are not neighbours (a column block, a transposed head), where `chunks_mut` cannot cut.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the slice was borrowed exclusively; `range` hands the duty of not overlapping to its caller.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Lends `slice` for writing from several tasks.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: std::marker::PhantomData,
        }
    }

    /// Where the slice begins.
    pub fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// The elements `start..start + len`.
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

    /// How many parts of `size` elements there are, a shorter last one included.
    fn parts(&self, size: usize) -> usize {
        self.len.div_ceil(size)
    }

    /// The elements of part `index`.
    ///
    /// # Safety
    /// No two tasks may hold the same part at the same time, nor parts of different sizes.
    #[allow(clippy::mut_from_ref)] // as in `range`
    #[inline(always)]
    unsafe fn part(&self, index: usize, size: usize) -> &mut [T] {
        let start = index * size;
        // SAFETY: parts of one size do not overlap; that each is held once is the caller's promise.
        unsafe { self.range(start, size.min(self.len - start)) }
    }
}

/// Rows in one task, for rows of `width` elements.
fn rows_per_task(width: usize) -> usize {
    (TASK_ELEMENTS / width.max(1)).max(1)
}

/// Calls `f(first_row, rows)` on consecutive groups of whole rows of `out`, rows being `width` elements.
pub fn for_rows<T: Send>(out: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if width == 0 || out.is_empty() {
        return; // also for the scratch of a row, which may be longer than memory where there is no row
    }
    debug_assert_eq!(out.len() % width, 0);
    let rows = rows_per_task(width);
    let (out, size) = (Shared::new(out), rows * width);
    for_tasks(out.parts(size), |task| {
        // SAFETY: part `task` is this task's.
        let part = unsafe { out.part(task, size) };
        f(task * rows, part);
    });
}

/// As [`for_rows`], with a second output of `second_width` elements a row, cut at the same rows.
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
        // SAFETY: part `task` of each is this task's.
        let (a, b) = unsafe { (first.part(task, size), second.part(task, second_size)) };
        f(task * rows, a, b);
    });
}

/// Calls `f(task)` for every task in `0..tasks`, in parallel.
pub fn for_tasks(tasks: usize, f: impl Fn(usize) + Sync) {
    run(tasks, usize::MAX, &f);
}

/// Runs `f(task)` for every task in `0..tasks`, in pieces of at most `piece` neighbouring tasks.
///
/// Not generic on purpose: rayon's machinery is compiled once, and not once for each kernel and type.
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

/// Calls `f(scratch, task)` for every task in `0..tasks`, in parallel, with one scratch a thread: threads take the next
/// task as they come free. What a task leaves in its scratch must not matter to the next.
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

/// Computes `out[j] = sum over rows of term(row)[j]`, or adds it to `out`. `add(rows, partial)` adds the terms of some
/// rows, in order, to `partial`.
///
/// Blocks of a fixed number of rows are summed each on its own, then the blocks in order: the same bits for any number
/// of threads, and shorter chains of rounding than a plain loop.
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
        // SAFETY: part `block` is this task's.
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

/// How many elements [`sum_rows`] takes for its blocks.
pub(crate) fn block_sums(rows: usize, width: usize) -> f64 {
    rows.div_ceil(BLOCK_ROWS) as f64 * width as f64
}

/// The sum of `f(range)` over consecutive ranges of [`TASK_ELEMENTS`] that cover `0..n`, the ranges' results added in
/// order.
pub fn sum_ranges(n: usize, f: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let mut partials = vec![0.0; n.div_ceil(TASK_ELEMENTS)];
    let shared = Shared::new(&mut partials);
    for_tasks(shared.parts(1), |task| {
        let range = task * TASK_ELEMENTS..n.min((task + 1) * TASK_ELEMENTS);
        // SAFETY: part `task` is this task's.
        let sum = unsafe { shared.part(task, 1) };
        sum[0] = f(range);
    });
    partials.iter().sum()
}

/// A vector of `len` numbers that `fill` writes completely before anybody reads it: no pass of zeros first.
///
/// # Errors
/// No room for so many.
pub fn filled<T: WithDType>(
    len: usize,
    fill: impl FnOnce(&mut [T]),
) -> Result<Vec<T>, TryReserveError> {
    let mut out = Vec::new();
    out.try_reserve_exact(len)?;
    // SAFETY: the capacity is there, any bits are a number of type T, and `fill` (a kernel) writes every element
    // without reading.
    unsafe {
        fill(std::slice::from_raw_parts_mut(out.as_mut_ptr(), len));
        out.set_len(len);
    }
    Ok(out)
}
