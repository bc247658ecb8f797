//! Products of whole matrices, cut into blocks that the tile products of `tile` take from cache.

use super::tile::{COLUMNS, Product};
use super::{MatRef, Threads, is_done};
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Lanes, Real, Stored};
use std::ops::Range;

/// Depth of a block: a strip of b this deep fits the first-level cache.
const DEPTH: usize = 192;

/// Columns of a strip of b: three AVX-512 registers of f32.
const STRIP: usize = 3 * COLUMNS;

/// Rows of a block at most: how often a packed strip of b is used, and with [`DEPTH`] what the second-level cache holds of
/// a.
const ROWS: usize = 512;

/// Tasks a thread to cut a product into, if it is large enough: for all to end at about the same time.
const TASKS: usize = 3;

/// Strips in a task: fewer would pack a too often, and more hold too large a block of c.
const STRIPS: Range<usize> = 3..11;

/// `c = a b`, or `c += a b` where `accumulate`; c is (a.rows, b.cols), row by row. Each may be stored in a type of its own;
/// all are computed in one, and c is rounded once.
///
/// Every element is one chain of multiply-adds in the order of the depth: the bits do not depend on the cut, nor on the
/// number of threads.
pub(super) fn product<A, B, C, W>(
    a: MatRef<'_, A>,
    b: MatRef<'_, B>,
    c: &mut [C],
    accumulate: bool,
    threads: Threads,
) where
    A: Stored<Wide = W>,
    B: Stored<Wide = W>,
    C: Stored<Wide = W>,
    W: Lanes,
{
    if is_done(a, b, c, accumulate) {
        return;
    }
    let Cut {
        rows,
        row_blocks,
        columns,
        column_blocks,
    } = Cut::of(a.rows, b.cols);

    let width = b.cols;
    let c = Shared::new(c);
    let scratch = || Scratch::new(rows.min(a.rows), columns.min(width), a.cols.min(DEPTH));
    let task = |scratch: &mut Scratch<W>, index: usize| {
        // Consecutive tasks share their columns of b.
        let (column, row) = (index / row_blocks, index % row_blocks);
        let rows = row * rows..a.rows.min((row + 1) * rows);
        let columns = column * columns..width.min((column + 1) * columns);
        scratch.block(a, b, rows.clone(), columns.clone());
        for (i, row) in rows.enumerate() {
            // SAFETY: the tasks' blocks of c do not overlap.
            let c = unsafe { c.range(row * width + columns.start, columns.len()) };
            vectorized(
                #[inline(always)]
                || scratch.store_row(i, accumulate, c),
            );
        }
    };
    let tasks = row_blocks * column_blocks;
    match threads {
        Threads::All => parallel::for_tasks_with(tasks, scratch, task),
        Threads::One => {
            let mut scratch = scratch();
            (0..tasks).for_each(|index| task(&mut scratch, index));
        }
    }
}

/// How c is cut into blocks.
struct Cut {
    /// Rows of a block.
    rows: usize,
    row_blocks: usize,
    /// Columns of a block.
    columns: usize,
    column_blocks: usize,
}

impl Cut {
    fn of(rows: usize, cols: usize) -> Self {
        let row_blocks = rows.div_ceil(ROWS);
        let block_rows = rows.div_ceil(row_blocks).next_multiple_of(8);
        let columns = columns(row_blocks, cols);
        Self {
            rows: block_rows,
            row_blocks: rows.div_ceil(block_rows),
            columns,
            column_blocks: cols.div_ceil(columns),
        }
    }
}

/// Columns of a block, by how many blocks of rows there are.
fn columns(row_blocks: usize, cols: usize) -> usize {
    let strips = cols.div_ceil(STRIP);
    let tasks = TASKS * rayon::current_num_threads();
    let strips_per_task = strips.saturating_mul(row_blocks) / tasks;
    strips_per_task.clamp(STRIPS.start, STRIPS.end - 1) * STRIP
}

/// The most elements that [`product`] takes for all of its threads' [`Scratch`], for this many rows or fewer.
pub(super) fn scratch_elements(rows: usize, depth: usize, cols: usize, threads: Threads) -> f64 {
    let of = |rows: usize, columns: usize| {
        let (depth, columns) = (depth.min(DEPTH), columns.min(cols).next_multiple_of(STRIP));
        (rows * (depth + columns) + depth * (STRIP + COLUMNS)) as f64
    };
    let cut = Cut::of(rows, cols);
    let one = of(cut.rows.min(rows), cut.columns);
    // One row more than fills so many blocks makes one block more, of which each is smaller.
    let full = match rows.div_ceil(ROWS) {
        1 => one,
        blocks => of(ROWS, columns(blocks - 1, cols)),
    };
    let workers = match threads {
        Threads::One => 1,
        Threads::All => {
            let tasks = cut.row_blocks.saturating_mul(cut.column_blocks);
            tasks.min(rayon::current_num_threads())
        }
    };
    workers as f64 * one.max(full)
}

/// What one thread works in.
struct Scratch<W> {
    /// A block of a, where it is not used as it lies: (rows, DEPTH), or (DEPTH, rows).
    a: Vec<W>,
    /// A strip of b: (DEPTH, STRIP).
    b: Vec<W>,
    /// Rows of b that are columns in memory: (COLUMNS, DEPTH).
    lines: Vec<W>,
    /// A block of c, strip after strip: (strips, rows, STRIP).
    c: Vec<W>,
    /// Rows of the block in c.
    rows: usize,
}

impl<W: Lanes> Scratch<W> {
    fn new(rows: usize, columns: usize, depth: usize) -> Self {
        Self {
            a: vec![W::ZERO; rows * depth],
            b: vec![W::ZERO; depth * STRIP],
            lines: vec![W::ZERO; COLUMNS * depth],
            c: vec![W::ZERO; rows * columns.next_multiple_of(STRIP)],
            rows,
        }
    }

    /// Computes a block of c.
    fn block<A, B>(
        &mut self,
        a: MatRef<'_, A>,
        b: MatRef<'_, B>,
        rows: Range<usize>,
        columns: Range<usize>,
    ) where
        A: Stored<Wide = W>,
        B: Stored<Wide = W>,
    {
        self.rows = rows.len();
        for start in (0..a.cols).step_by(DEPTH) {
            let depth = start..a.cols.min(start + DEPTH);
            let (a, a_row, a_col) = a_block(a, rows.clone(), depth.clone(), &mut self.a);
            for (strip, first) in columns.clone().step_by(STRIP).enumerate() {
                let strip_columns = first..columns.end.min(first + STRIP);
                pack_strip(
                    b,
                    depth.clone(),
                    strip_columns.clone(),
                    &mut self.b,
                    &mut self.lines,
                );
                let product = Product {
                    a,
                    a_row,
                    a_col,
                    b: &self.b,
                    b_row: STRIP,
                    c: &mut self.c[strip * rows.len() * STRIP..][..rows.len() * STRIP],
                    c_row: STRIP,
                    rows: rows.len(),
                    columns: strip_columns.len().next_multiple_of(COLUMNS),
                    depth: depth.len(),
                    accumulate: start > 0,
                };
                product.run();
            }
        }
    }

    /// Rounds row `row` of the block into its place.
    #[inline(always)]
    fn store_row<C: Stored<Wide = W>>(&mut self, row: usize, accumulate: bool, c: &mut [C]) {
        let size = self.rows * STRIP;
        for (strip, c) in c.chunks_mut(STRIP).enumerate() {
            let sums = &mut self.c[strip * size + row * STRIP..][..c.len()];
            if accumulate {
                let mut before = [W::ZERO; STRIP];
                C::load(c, &mut before[..c.len()]);
                for (sum, before) in sums.iter_mut().zip(before) {
                    *sum += before;
                }
            }
            C::store(sums, c);
        }
    }
}

/// A block of a, with its strides: as it lies where it can be, else in `to`. Either way its lines stay lines: elements of a
/// are broadcast, in any order.
fn a_block<'a, A: Stored>(
    a: MatRef<'a, A>,
    rows: Range<usize>,
    depth: Range<usize>,
    to: &'a mut [A::Wide],
) -> (&'a [A::Wide], usize, usize) {
    let by_rows = a.col_stride == 1;
    if by_rows && let Some(wide) = A::as_wide(a.data) {
        return (
            &wide[rows.start * a.row_stride + depth.start..],
            a.row_stride,
            1,
        );
    }
    // Lines of the matrix as it lies in memory, and which part of each.
    let (lines, part, stride) = match by_rows {
        true => (rows, depth, a.row_stride),
        false => (depth, rows, a.col_stride),
    };
    vectorized(
        #[inline(always)]
        || {
            for (line, to) in lines.zip(to.chunks_exact_mut(part.len())) {
                A::load(&a.data[line * stride..][part.clone()], to);
            }
        },
    );
    match by_rows {
        true => (to, part.len(), 1),
        false => (to, 1, part.len()),
    }
}

/// A strip of b into `to`, (depth, STRIP), with zeros beyond its columns.
fn pack_strip<B: Stored>(
    b: MatRef<'_, B>,
    depth: Range<usize>,
    columns: Range<usize>,
    to: &mut [B::Wide],
    lines: &mut [B::Wide],
) {
    let to = &mut to[..depth.len() * STRIP];
    if b.col_stride == 1 {
        vectorized(
            #[inline(always)]
            || {
                for (row, to) in depth.zip(to.chunks_exact_mut(STRIP)) {
                    let (filled, rest) = to.split_at_mut(columns.len());
                    B::load(&b.data[row * b.row_stride..][columns.clone()], filled);
                    rest.fill(B::Wide::ZERO);
                }
            },
        );
        return;
    }
    let lines = &mut lines[..COLUMNS * depth.len()];
    for first in (0..STRIP).step_by(COLUMNS) {
        let count = columns.len().saturating_sub(first).min(COLUMNS);
        if count == 0 {
            break; // the product does not read that far
        }
        vectorized(
            #[inline(always)]
            || {
                let (filled, rest) = lines.split_at_mut(count * depth.len());
                for (i, line) in filled.chunks_exact_mut(depth.len()).enumerate() {
                    let column = columns.start + first + i;
                    B::load(&b.data[column * b.col_stride..][depth.clone()], line);
                }
                rest.fill(B::Wide::ZERO);
                transpose(lines, depth.len(), &mut to[first..]);
            },
        );
    }
}

/// `to[k][..16] = lines[..16][k]`: lines (COLUMNS, depth), to (depth, STRIP).
#[inline(always)]
fn transpose<W: Real>(lines: &[W], depth: usize, to: &mut [W]) {
    let lines: [&[W]; COLUMNS] = std::array::from_fn(|i| &lines[i * depth..][..depth]);
    for k in 0..depth {
        let to = &mut to[k * STRIP..][..COLUMNS];
        for (to, line) in to.iter_mut().zip(lines) {
            *to = line[k];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Small integers, so that products and their sums are exact in f32 and one rounding is all that is left.
    fn integers<T: Stored>(n: usize, step: usize) -> Vec<T> {
        let value = |i: usize| (i * step % 7) as f64 - 3.0;
        (0..n).map(|i| T::from_f64(value(i))).collect()
    }

    /// A matrix of `rows` x `cols`, as it lies or as the transpose of what lies there.
    fn view<T>(data: &[T], rows: usize, cols: usize, transposed: bool) -> MatRef<'_, T> {
        match transposed {
            false => MatRef::new(data, rows, cols),
            true => MatRef::new(data, cols, rows).t(),
        }
    }

    /// Sizes at, beside and beyond every edge: register blocks, strips, depths, blocks of rows.
    const SIZES: [(usize, usize, usize); 12] = [
        (1, 1, 1),
        (1, DEPTH, STRIP),
        (7, 3, 15),
        (9, DEPTH + 1, STRIP + 1),
        (ROWS, 2 * DEPTH, COLUMNS),
        (ROWS + 1, 5, 5 * STRIP - 1),
        (2 * ROWS + 13, DEPTH - 1, 31),
        (33, 2 * DEPTH + 17, 11 * STRIP + 33),
        (8, 0, 20),
        (0, 5, 3),
        (3, 5, 0),
        (2 * ROWS, 0, 11 * STRIP),
    ];

    fn exact_for<A, B, C, W>()
    where
        A: Stored<Wide = W>,
        B: Stored<Wide = W>,
        C: Stored<Wide = W>,
        W: Lanes,
    {
        for (rows, depth, cols) in SIZES {
            let (a, b) = (
                integers::<A>(rows * depth, 3),
                integers::<B>(depth * cols, 5),
            );
            for (a_transposed, b_transposed) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let (a, b) = (
                    view(&a, rows, depth, a_transposed),
                    view(&b, depth, cols, b_transposed),
                );
                for accumulate in [false, true] {
                    let before = integers::<C>(rows * cols, 4);
                    let mut c = before.clone();
                    product(a, b, &mut c, accumulate, Threads::All);
                    let mut one = before.clone();
                    product(a, b, &mut one, accumulate, Threads::One);
                    for i in 0..rows * cols {
                        let (row, col) = (i / cols, i % cols);
                        let mut sum = if accumulate { before[i].to_f64() } else { 0.0 };
                        for k in 0..depth {
                            let x = a.data[row * a.row_stride + k * a.col_stride].to_f64();
                            sum += x * b.data[k * b.row_stride + col * b.col_stride].to_f64();
                        }
                        let wanted = C::from_f64(sum).to_f64();
                        assert_eq!(c[i].to_f64(), wanted, "{rows}x{depth}x{cols} at {i}");
                        assert_eq!(one[i].to_f64(), wanted);
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_exact_at_every_edge() {
        exact_for::<f32, f32, f32, f32>();
        exact_for::<f64, f64, f64, f64>();
        exact_for::<bf16, bf16, bf16, f32>();
        exact_for::<f16, f16, f16, f32>();
        exact_for::<bf16, f32, f32, f32>();
        exact_for::<f32, f16, bf16, f32>();
    }
}
