//! Matmuls of whole bf16 matrices. A task loops over blocks of the depth; for each, it packs its columns of b, then two
//! panels of rows of a at a time, and computes blocks of 32 x 32.

use super::super::cut::{Costs, Cut};
use super::super::matrix::MatRef;
use super::super::scratch::with_scratch;
use super::super::threads::Threads;
use super::output::Output;
use super::pack::{Lines, packed_len};
use super::terms::Element;
use super::tile::{BLOCK, DEPTH, Factors, SIDE, TILE, Tiles};
use super::unit::Unit;
use crate::kernels::cpu::parallel;
use half::bf16;
use std::ops::Range;

/// The number of sums of a block: tiles (2, 2) of (SIDE, SIDE) each.
const BLOCK_SUMS: usize = BLOCK * BLOCK;

/// The largest depth of a block, over all terms: two panels of a then fit the first-level cache.
const MAX_DEPTH: usize = 512;

/// The most columns of a task: its packed block of b then fits a part of the second-level cache.
const MAX_COLUMNS: usize = 768;

/// The most rows of a task; half as many if the depth is processed in several blocks, between which sums are kept.
const MAX_ROWS: usize = 1024;

/// The cost of packing an element, in multiply-adds: copied, or transposed.
const COPY: usize = 50;
const TRANSPOSE: usize = 80;

/// Computes `c = a b`, or `c += a b` if the output adds. Sums run over the whole depth, are then added to c's values
/// and rounded. c must have elements, and the depth must not be 0.
///
/// The bits depend on the factors and the unit alone, neither on the cut nor on the number of threads.
///
/// # Safety
/// c must still be borrowed, by nobody else.
pub(in super::super) unsafe fn matmul<X: Element>(
    unit: Unit,
    a: MatRef<'_, X>,
    b: MatRef<'_, X>,
    c: Output,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "depth");
    assert_eq!([a.rows, b.cols], [c.rows, c.cols], "output");
    let workers = match threads {
        Threads::All => rayon::current_num_threads(),
        Threads::One => 1,
    };
    let depth_step = depth_step::<X>(a.cols);
    let costs = Costs {
        a: if a.col_stride == 1 { COPY } else { TRANSPOSE },
        b: if b.col_stride == 1 { COPY } else { TRANSPOSE },
        units: [BLOCK; 2],
        most: match a.cols > depth_step {
            true => [MAX_ROWS / 2, MAX_COLUMNS],
            false => [MAX_ROWS, MAX_COLUMNS],
        },
    };
    let cut = Cut::best([a.rows, b.cols], costs, workers);
    let depth = a.cols;
    let a = Lines {
        data: a.data,
        line: a.row_stride,
        panel: SIDE * a.row_stride,
        depth: a.col_stride,
        is_b: false,
    };
    let b = Lines {
        data: b.data,
        line: b.col_stride,
        panel: SIDE * b.col_stride,
        depth: b.row_stride,
        is_b: true,
    };
    let task = |index: usize| {
        let (rows, columns) = cut.block(index);
        let block = Block {
            unit,
            factors: [a, b],
            rows,
            columns,
            depth,
            depth_step,
        };
        with_scratch(block.scratch_len(), |scratch| {
            // SAFETY: the caller's promise; the block is inside c, as asserted above, and no other task's overlaps it.
            unsafe { block.run(scratch, c) };
        });
    };
    match threads {
        Threads::All => parallel::for_tasks(cut.tasks(), task),
        Threads::One => (0..cut.tasks()).for_each(task),
    }
}

/// Runs [`matmul`] on the calling thread, for factors that are in cache: c is (rows, columns).
///
/// # Safety
/// c must still be borrowed, by nobody else.
pub(in super::super) unsafe fn matmul_of_tiles<X: Element>(
    unit: Unit,
    factors: [Lines<'_, X>; 2],
    depth: usize,
    c: Output,
) {
    let depth_step = depth_step::<X>(depth);
    for row in (0..c.rows).step_by(MAX_ROWS / 2) {
        for column in (0..c.cols).step_by(MAX_COLUMNS) {
            let block = Block {
                unit,
                factors,
                rows: row..c.rows.min(row + MAX_ROWS / 2),
                columns: column..c.cols.min(column + MAX_COLUMNS),
                depth,
                depth_step,
            };
            with_scratch(block.scratch_len(), |scratch| {
                // SAFETY: the caller's promise; the block is inside c.
                unsafe { block.run(scratch, c) };
            });
        }
    }
}

struct Block<'a, X> {
    unit: Unit,
    factors: [Lines<'a, X>; 2],
    rows: Range<usize>,
    columns: Range<usize>,
    depth: usize,
    depth_step: usize,
}

impl<X: Element> Block<'_, X> {
    /// Returns the numbers of elements (f32) of the packed block of b, the packed panels of a, and the sums.
    fn sizes(&self) -> [usize; 3] {
        let depth = self.depth.min(self.depth_step);
        let sums = match self.depth > self.depth_step {
            true => self.rows.len().div_ceil(BLOCK) * self.columns.len().div_ceil(BLOCK),
            false => 1,
        };
        [
            X::TERMS * packed_len(self.columns.len(), depth) / 2,
            X::TERMS * packed_len(BLOCK, depth) / 2,
            sums * BLOCK_SUMS,
        ]
    }

    /// Returns the number of scratch elements that [`run`](Self::run) needs.
    fn scratch_len(&self) -> usize {
        self.sizes().iter().sum()
    }

    /// Computes the block.
    ///
    /// # Safety
    /// The block must be inside c, c still borrowed, and no other thread may access the block.
    unsafe fn run(&self, scratch: &mut [f32], c: Output) {
        let [b_len, a_len, _] = self.sizes();
        let (b_packed, rest) = scratch.split_at_mut(b_len);
        let (a_packed, sums) = rest.split_at_mut(a_len);
        let [a_packed, b_packed] = [a_packed, b_packed].map(as_bf16);
        let (rows, columns) = (self.rows.len(), self.columns.len());
        let blocks = columns.div_ceil(BLOCK);
        let session = self.unit.start();
        for first in (0..self.depth).step_by(self.depth_step) {
            let depth = first..self.depth.min(first + self.depth_step);
            let is_last = depth.end == self.depth;
            let panel = packed_len(1, depth.len());
            let [a, b] = self.factors;
            let b_term = packed_len(columns, depth.len());
            let b_terms = b.pack(self.unit, self.columns.clone(), depth.clone(), b_packed);
            for row in (0..rows).step_by(BLOCK) {
                let count = BLOCK.min(rows - row);
                let lines = self.rows.start + row..self.rows.start + row + count;
                let a_term = packed_len(count, depth.len());
                let a_terms = a.pack(self.unit, lines, depth.clone(), a_packed);
                for column in (0..columns).step_by(BLOCK) {
                    let width = BLOCK.min(columns - column);
                    let index = row / BLOCK * blocks + column / BLOCK;
                    let sums = match self.depth > self.depth_step {
                        true => &mut sums[index * BLOCK_SUMS..],
                        false => &mut *sums,
                    };
                    let sums = &mut sums[..BLOCK_SUMS];
                    let factors = |[of_a, of_b]: [usize; 2]| Factors {
                        a: a_packed[of_a * a_term..].as_ptr(),
                        a_panel: panel,
                        b: b_packed[of_b * b_term + column / SIDE * panel..].as_ptr(),
                        b_panel: panel,
                        steps: panel / TILE,
                    };
                    let tiles = Tiles {
                        rows: count.div_ceil(SIDE),
                        columns: width.div_ceil(SIDE),
                    };
                    let place = [self.rows.start + row, self.columns.start + column];
                    if is_last {
                        c.prefetch(place, count);
                    }
                    // The matmul of both second terms is left out: it is at most 2^-16 of the elements' product.
                    let terms = [[0, 0], [0, 1], [1, 0]];
                    for terms in terms
                        .into_iter()
                        .filter(|[a, b]| *a < a_terms && *b < b_terms)
                    {
                        let (factors, adds) = (factors(terms), first > 0 || terms != [0, 0]);
                        // SAFETY: packed panels of these tiles, and a block of sums.
                        unsafe { session.multiply(factors, tiles, sums.as_mut_ptr(), adds) };
                    }
                    if is_last {
                        // SAFETY: a part of the block.
                        unsafe { c.store(self.unit, place, [count, width], sums) };
                    }
                }
            }
        }
    }
}

/// Reinterprets the memory as twice as many bf16 elements.
fn as_bf16(x: &mut [f32]) -> &mut [bf16] {
    // SAFETY: bf16 needs less alignment than f32, and every bit pattern is valid.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), 2 * x.len()) }
}

/// Returns the depth of a block: blocks are about equal, in whole tiles.
fn depth_step<X: Element>(depth: usize) -> usize {
    let blocks = depth.div_ceil(MAX_DEPTH / X::TERMS).max(1);
    depth.div_ceil(blocks).next_multiple_of(DEPTH).max(DEPTH)
}
