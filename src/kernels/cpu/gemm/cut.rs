//! The division of a matmul into blocks and tasks.

use super::matrix::MatRef;
use super::micro_kernel::{COLUMNS, PANEL};
use super::pack::is_read_in_place;
use crate::kernels::cpu::Stored;
use std::ops::Range;

/// The most bytes in a row of b's strip, or of a panel of a: it bounds the depth of a block. Half or twice as much
/// costs 1%: c is read and written more often, or the blocks of b are narrower.
pub(super) const DEPTH_BYTES: usize = 320 * 4;

/// The most rows in a block of a: enough to read pieces of its columns at the memory's speed.
pub(super) const ROWS: usize = 128;

/// The most bytes in a packed block of b: a quarter of a current second-level cache, which c and the data packed next
/// also pass through. Half as much was slower with two threads.
const BLOCK_BYTES: usize = 1 << 19;

/// The most rows of a task, over which the packing of a block of b pays off.
const MAX_ROWS: usize = 1024;

/// The fewest rows or columns of a task, if the shape has them.
const MIN_LENGTH: usize = 96;

/// The most tasks per thread in each direction.
const MAX_TASKS: usize = 8;

/// The division of c into the blocks of tasks.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    rows: usize,
    cols: usize,
    row_step: usize,
    column_step: usize,
}

/// The costs and limits that decide a cut.
pub(super) struct Costs {
    /// The cost of packing an element of a, in multiply-adds.
    pub a: usize,
    /// The cost of packing an element of b, in multiply-adds.
    pub b: usize,
    /// Rows and columns come in multiples of these.
    pub units: [usize; 2],
    /// The most rows and columns of a block.
    pub most: [usize; 2],
}

impl Cut {
    /// Returns the cut for the micro-kernel.
    pub(super) fn new<T: Stored>(a: MatRef<'_, T>, b: MatRef<'_, T>, workers: usize) -> Self {
        const COPY: usize = 12;
        const TRANSPOSE: usize = 24;
        let columns = (BLOCK_BYTES / DEPTH_BYTES).next_multiple_of(COLUMNS);
        let costs = Costs {
            a: if is_read_in_place(a) { 1 } else { COPY },
            b: if b.col_stride == 1 { COPY } else { TRANSPOSE },
            units: [PANEL, COLUMNS],
            most: [MAX_ROWS, columns],
        };
        Self::best([a.rows, b.cols], costs, workers)
    }

    /// Returns the cut whose busiest thread finishes first.
    ///
    /// The cost of a task, in multiply-adds per unit of the depth, is that of its block plus the packing of its rows of
    /// a and its columns of b, which every task does itself.
    pub(super) fn best([rows, cols]: [usize; 2], costs: Costs, workers: usize) -> Self {
        let ([row_unit, column_unit], [most_rows, most_columns]) = (costs.units, costs.most);
        let whole = Self {
            rows,
            cols,
            row_step: most_rows,
            column_step: most_columns,
        };
        let mut best = (usize::MAX, whole);
        for row_step in steps(rows, row_unit, most_rows, workers) {
            for column_step in steps(cols, column_unit, most_columns, workers) {
                let cut = Self {
                    row_step,
                    column_step,
                    ..whole
                };
                let task = row_step * column_step + costs.a * row_step + costs.b * column_step;
                // Threads do not run equally fast: the last one finishes late by a fraction of a task.
                let late = if workers > 1 { task / 8 } else { 0 };
                let time = cut.tasks().div_ceil(workers) * task + late;
                if time < best.0 {
                    best = (time, cut);
                }
            }
        }
        best.1
    }

    pub(super) fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_step) * self.cols.div_ceil(self.column_step)
    }

    /// Returns the rows and columns of block `index`.
    pub(super) fn block(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let row_blocks = self.rows.div_ceil(self.row_step);
        let (column, row) = (index / row_blocks, index % row_blocks);
        let part = |i: usize, step: usize, length: usize| i * step..length.min((i + 1) * step);
        (
            part(row, self.row_step, self.rows),
            part(column, self.column_step, self.cols),
        )
    }
}

/// Returns the candidate lengths of a task: equal parts in whole units, none above `most` or needlessly short.
fn steps(length: usize, unit: usize, most: usize, workers: usize) -> impl Iterator<Item = usize> {
    let fewest = length.div_ceil(most).max(1);
    (fewest..=fewest + MAX_TASKS * workers).filter_map(move |parts| {
        let step = length.div_ceil(parts).next_multiple_of(unit).max(unit);
        (parts == fewest || step >= MIN_LENGTH).then_some(step)
    })
}
