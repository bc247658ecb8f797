//! Matmuls of whole matrices, divided into blocks that the micro-kernel reads from cache.
//!
//! The loops, from outside in: tasks (blocks of c); blocks of the depth, for each of which a task packs its columns of
//! b into the second-level cache; blocks of rows of a, packed only if they cannot be read in place; then the
//! micro-kernel's: panels of 8 rows, which stay in the first-level cache, strips of columns, and the depth. After Goto
//! and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, with the roles of the caches changed:
//! current processors read b from the second level as fast as they multiply, so that c is written row by row, and the
//! first level does not bound the depth.

use super::cut::{Cut, DEPTH_BYTES, ROWS};
use super::matrix::{MatMut, MatRef};
use super::micro_kernel::{COLUMNS, Sums, Tiles};
use super::pack::{Panels, a_block, a_elements, b_block, is_read_in_place};
use super::scratch::with_scratch;
use super::threads::Threads;
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Real, Stored};
use std::ops::Range;

/// Computes `c = a b`, or `c += a b` if `accumulate`. Factors are widened as they are packed, and c is rounded as it is
/// stored.
///
/// Every element is the sum, in order, of one chain of multiply-adds per block of the depth, and the blocks depend on
/// the depth alone: the bits depend neither on the cut nor on the number of threads.
pub(super) fn matmul<T, C>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    assert_eq!(a.cols, b.rows, "depth");
    assert_eq!([a.rows, b.cols], [c.rows, c.cols], "output");
    let workers = match threads {
        Threads::All => rayon::current_num_threads(),
        Threads::One => 1,
    };
    let in_place = C::as_wide(&[]).is_some();
    let cut = Cut::new(a, b, workers);
    let c_row = c.row_stride;
    let c = Shared::new(c.data);
    let task = |index: usize| {
        let (rows, columns) = cut.block(index);
        let start = |row: usize| row * c_row + columns.start;
        let block = Block {
            a,
            b,
            rows: rows.clone(),
            columns: columns.clone(),
        };
        if in_place {
            let c = c.as_mut_ptr().cast::<T::Wide>();
            return with_scratch(block.elements(), |scratch| {
                // SAFETY: C is its own wide type; the block is inside c, as asserted above, and no other task's
                // overlaps it.
                unsafe { block.run(c.add(start(rows.start)), c_row, accumulate, scratch) };
            });
        }
        with_scratch(block.elements() + rows.len() * columns.len(), |scratch| {
            let (sums, scratch) = scratch.split_at_mut(rows.len() * columns.len());
            // SAFETY: `sums` is as large as the block and belongs to this task.
            unsafe { block.run(sums.as_mut_ptr(), columns.len(), false, scratch) };
            vectorized(
                #[inline(always)]
                || {
                    for (row, sums) in rows.zip(sums.chunks_exact_mut(columns.len())) {
                        // SAFETY: no other task's block of c overlaps this one.
                        let c = unsafe { c.range(start(row), columns.len()) };
                        store_row(sums, accumulate, c);
                    }
                },
            );
        });
    };
    match threads {
        Threads::All => parallel::for_tasks(cut.tasks(), task),
        Threads::One => (0..cut.tasks()).for_each(task),
    }
}

/// Rounds a row of sums and stores it in c.
#[inline(always)]
fn store_row<C: Stored>(sums: &mut [C::Wide], accumulate: bool, c: &mut [C]) {
    if !accumulate {
        return C::store(sums, c);
    }
    for (sums, c) in sums.chunks_mut(COLUMNS).zip(c.chunks_mut(COLUMNS)) {
        let mut before = [C::Wide::ZERO; COLUMNS];
        C::load(c, &mut before[..c.len()]);
        for (sum, before) in sums.iter_mut().zip(before) {
            *sum += before;
        }
        C::store(sums, c);
    }
}

struct Block<'a, T> {
    a: MatRef<'a, T>,
    b: MatRef<'a, T>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<T: Stored> Block<'_, T> {
    /// Returns the numbers of elements of a packed block of b, of one of a, and of the scratch for packing b.
    fn sizes(&self) -> [usize; 3] {
        let depth = depth_step::<T::Wide>(self.a.cols);
        let a = match is_read_in_place(self.a) {
            true => 0,
            false => a_elements(self.rows.len().min(ROWS), depth).next_multiple_of(COLUMNS),
        };
        let lines = match self.b.col_stride {
            1 => 0,
            _ => COLUMNS * depth,
        };
        [
            self.columns.len().next_multiple_of(COLUMNS) * depth,
            a,
            lines,
        ]
    }

    /// Returns the number of scratch elements that [`run`](Self::run) needs.
    fn elements(&self) -> usize {
        self.sizes().iter().sum()
    }

    /// Computes the block and writes it to `c`.
    ///
    /// # Safety
    /// `c` must be the first element of the block, writable by this thread alone, in rows `c_row` apart.
    unsafe fn run(
        &self,
        c: *mut T::Wide,
        c_row: usize,
        mut accumulate: bool,
        scratch: &mut [T::Wide],
    ) {
        let [b_size, a_size, _] = self.sizes();
        let (b_packed, rest) = scratch.split_at_mut(b_size);
        let (a_packed, lines) = rest.split_at_mut(a_size);
        let whole_depth = self.a.cols;
        let step = depth_step::<T::Wide>(whole_depth);
        for start in (0..whole_depth).step_by(step) {
            let depth = start..whole_depth.min(start + step);
            b_block(self.b, depth.clone(), self.columns.clone(), b_packed, lines);
            for first in self.rows.clone().step_by(ROWS) {
                let rows = first..self.rows.end.min(first + ROWS);
                let panels = a_block(self.a, rows.clone(), depth.clone(), a_packed);
                let Panels { a, row, col, panel } = panels;
                let tiles = Tiles {
                    a,
                    a_row: row,
                    a_col: col,
                    a_panel: panel,
                    b: b_packed.as_ptr(),
                    b_row: COLUMNS,
                    b_unit: COLUMNS * depth.len(),
                    // SAFETY: inside the block, by the caller's promise.
                    c: unsafe { c.add((first - self.rows.start) * c_row) },
                    c_row,
                    rows: rows.len(),
                    columns: self.columns.len(),
                    depth: depth.len(),
                    sums: if accumulate { Sums::Add } else { Sums::Replace },
                };
                // SAFETY: packed blocks of these sizes, and c by the caller's promise.
                unsafe { tiles.run() };
            }
            accumulate = true;
        }
        if !accumulate {
            for row in 0..self.rows.len() {
                // SAFETY: inside the block, by the caller's promise.
                let c = unsafe {
                    std::slice::from_raw_parts_mut(c.add(row * c_row), self.columns.len())
                };
                c.fill(T::Wide::ZERO); // an empty sum
            }
        }
    }
}

/// Returns the depth of a block: blocks are about equal, in multiples of the block that is transposed at a time.
fn depth_step<W>(depth: usize) -> usize {
    let most = DEPTH_BYTES / size_of::<W>();
    let blocks = depth.div_ceil(most).max(1);
    depth.div_ceil(blocks).next_multiple_of(4).max(4)
}
