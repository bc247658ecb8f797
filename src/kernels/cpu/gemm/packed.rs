//! Products of whole matrices, cut into blocks that the micro-kernel takes from cache.
//!
//! The loops, from outside: tasks (blocks of c), blocks of the depth, for each of which a task packs its columns of b
//! for the second-level cache, blocks of rows of a, packed only where they cannot be read as they lie, and then the
//! micro-kernel's: panels of 8 rows, which stay in the first-level cache, strips of columns, the depth. After Goto and
//! van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, with the roles of the caches changed:
//! processors of today read b from the second level as fast as they multiply, so that c is passed row by row, and depth
//! is not bounded by the first.

use super::cut::{Cut, DEPTH_BYTES, ROWS};
use super::micro_kernel::{Sums, Tiles};
use super::pack::{Panels, a_block, a_elements, b_block, is_read_in_place};
use super::scratch::with_scratch;
use super::tile::COLUMNS;
use super::{MatMut, MatRef, Threads};
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Lanes, Real, Stored};
use std::ops::Range;

/// Factors of one product: a (rows, depth) and b (depth, cols).
pub(super) type Factors<'a, A, B> = (MatRef<'a, A>, MatRef<'a, B>);

/// A band of c, from some column, as the sum of products of one shape; their depths may differ.
pub(super) struct Band<'a, A, B> {
    pub terms: &'a [Factors<'a, A, B>],
    pub first_column: usize,
}

/// Every band of c, or what is added to it where `accumulate`. Each factor may be stored in a type of its own; all are
/// computed in one, and c is rounded once.
///
/// Every element is the sum, in order, of one chain of multiply-adds for each block of the depth, and the blocks depend
/// on the depth alone: the bits do not depend on the cut, nor on the number of threads.
pub(super) fn product<A, B, C, W>(
    bands: &[Band<'_, A, B>],
    c: MatMut<'_, C>,
    accumulate: bool,
    threads: Threads,
) where
    A: Stored<Wide = W>,
    B: Stored<Wide = W>,
    C: Stored<Wide = W>,
    W: Lanes,
{
    let workers = match threads {
        Threads::All => rayon::current_num_threads(),
        Threads::One => 1,
    };
    let in_place = C::as_wide(&[]).is_some();
    // A band, how it is cut, and the number of its first task.
    let mut tasks = 0;
    let mut cuts = Vec::with_capacity(bands.len());
    for band in bands {
        let (rows, cols) = (band.terms[0].0.rows, band.terms[0].1.cols);
        for (a, b) in band.terms {
            assert_eq!(a.cols, b.rows, "depth");
            assert_eq!((a.rows, b.cols), (rows, cols), "terms of one shape");
        }
        assert!(
            rows == c.rows && band.first_column + cols <= c.cols,
            "output"
        );
        let cut = Cut::new(band.terms, workers);
        cuts.push((tasks, cut));
        tasks += cut.tasks();
    }
    let c_row = c.row_stride;
    let c = Shared::new(c.data);
    let task = |index: usize| {
        let at = cuts.partition_point(|(first, _)| *first <= index) - 1;
        let (band, (first, cut)) = (&bands[at], cuts[at]);
        let (rows, columns) = cut.block(index - first);
        let block = Block::new(band.terms, rows.clone(), columns.clone());
        let start = |row: usize| row * c_row + band.first_column + columns.start;
        if in_place {
            let c = c.as_mut_ptr().cast::<W>();
            return with_scratch(block.elements(), |scratch| {
                // SAFETY: C is W; the block lies inside c, as asserted above, and no other task's overlaps it.
                unsafe { block.run(c.add(start(rows.start)), c_row, accumulate, scratch) };
            });
        }
        with_scratch(block.elements() + rows.len() * columns.len(), |scratch| {
            let (sums, scratch) = scratch.split_at_mut(rows.len() * columns.len());
            // SAFETY: `sums` has room for the block, and is this task's own.
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
        Threads::All => parallel::for_tasks(tasks, task),
        Threads::One => (0..tasks).for_each(task),
    }
}

/// Rounds a row of sums into its place.
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

/// One task: a block of c.
struct Block<'a, A, B> {
    terms: &'a [Factors<'a, A, B>],
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a, A, B, W> Block<'a, A, B>
where
    A: Stored<Wide = W>,
    B: Stored<Wide = W>,
    W: Lanes,
{
    fn new(terms: &'a [Factors<'a, A, B>], rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            terms,
            rows,
            columns,
        }
    }

    /// Elements of a packed block of a, of one of b, and of what packing b needs beside.
    fn sizes(&self, a: MatRef<'_, A>, b: MatRef<'_, B>) -> [usize; 3] {
        let depth = depth_step::<W>(a.cols);
        let a = match is_read_in_place(a) {
            true => 0,
            false => a_elements(self.rows.len().min(ROWS), depth).next_multiple_of(COLUMNS),
        };
        let lines = if b.col_stride == 1 {
            0
        } else {
            COLUMNS * depth
        };
        [
            self.columns.len().next_multiple_of(COLUMNS) * depth,
            a,
            lines,
        ]
    }

    /// Elements of scratch that [`run`](Self::run) needs.
    fn elements(&self) -> usize {
        let of = |(a, b): &Factors<'_, A, B>| self.sizes(*a, *b).iter().sum();
        self.terms.iter().map(of).max().unwrap_or_default()
    }

    /// Computes the block into `c`.
    ///
    /// # Safety
    /// `c` is the first element of the block, writable, by this thread alone, in rows `c_row` apart.
    unsafe fn run(&self, c: *mut W, c_row: usize, mut accumulate: bool, scratch: &mut [W]) {
        for (a, b) in self.terms {
            let [b_size, a_size, _] = self.sizes(*a, *b);
            let (b_packed, rest) = scratch.split_at_mut(b_size);
            let (a_packed, lines) = rest.split_at_mut(a_size);
            let step = depth_step::<W>(a.cols);
            for start in (0..a.cols).step_by(step) {
                let depth = start..a.cols.min(start + step);
                b_block(*b, depth.clone(), self.columns.clone(), b_packed, lines);
                for first in self.rows.clone().step_by(ROWS) {
                    let rows = first..self.rows.end.min(first + ROWS);
                    let panels = a_block(*a, rows.clone(), depth.clone(), a_packed);
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
        }
        if !accumulate {
            for row in 0..self.rows.len() {
                // SAFETY: inside the block, by the caller's promise.
                let c = unsafe {
                    std::slice::from_raw_parts_mut(c.add(row * c_row), self.columns.len())
                };
                c.fill(W::ZERO); // a sum over nothing
            }
        }
    }
}

/// Depth of a block: as equal as can be, in whole blocks of what is transposed at a time.
fn depth_step<W>(depth: usize) -> usize {
    let most = DEPTH_BYTES / size_of::<W>();
    let blocks = depth.div_ceil(most).max(1);
    depth.div_ceil(blocks).next_multiple_of(4).max(4)
}
