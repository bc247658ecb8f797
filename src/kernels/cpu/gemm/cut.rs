//! How a product is cut into blocks: what is in cache at a time, and what one task computes.

use super::matrix::MatRef;
use super::micro_kernel::{COLUMNS, PANEL};
use super::pack::is_read_in_place;
use crate::kernels::cpu::Stored;
use std::ops::Range;

/// Bytes of a row of b's strip, and of a panel of a, at most: the depth of a block. Half or twice that costs 1% either
/// way: c is read and written more often, or the blocks of b are narrower.
pub(super) const DEPTH_BYTES: usize = 320 * 4;

/// Rows of a block of a at most: enough for pieces of its columns to be read at the memory's speed.
pub(super) const ROWS: usize = 128;

/// Bytes of a packed block of b at most: a quarter of a second-level cache of today, for c and what is packed next pass
/// through it too. Half of it was slower with two threads.
const BLOCK_BYTES: usize = 1 << 19;

/// Rows of a task at most: what a block of b is packed for.
const MAX_ROWS: usize = 1024;

/// Rows or columns of a task at least, where the shape has them.
const MIN_LENGTH: usize = 96;

/// Tasks of a thread at most, in each direction.
const MAX_TASKS: usize = 8;

/// The blocks of c that tasks compute.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    rows: usize,
    cols: usize,
    /// Rows of a block.
    row_step: usize,
    /// Columns of a block.
    column_step: usize,
}

/// What decides about a cut.
pub(super) struct Costs {
    /// Of packing an element of a, in multiply-adds.
    pub a: usize,
    /// Of packing one of b.
    pub b: usize,
    /// Rows and columns that belong together.
    pub units: [usize; 2],
    /// Rows and columns of a block at most.
    pub most: [usize; 2],
}

impl Cut {
    /// The cut for the micro-kernel.
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

    /// The cut whose busiest thread ends first.
    ///
    /// What a task costs, in multiply-adds for each unit of the depth: those of its block, and packing its rows of a
    /// and its columns of b, which every task does for itself.
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
                // Threads do not run equally fast: the last one ends late by a part of a task.
                let late = if workers > 1 { task / 8 } else { 0 };
                let time = cut.tasks().div_ceil(workers) * task + late;
                if time < best.0 {
                    best = (time, cut);
                }
            }
        }
        best.1
    }

    /// How many blocks there are.
    pub(super) fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_step) * self.cols.div_ceil(self.column_step)
    }

    /// Rows and columns of block `index`.
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

/// Lengths of a task worth trying: equal parts in whole units, none above `most` nor needlessly short.
fn steps(length: usize, unit: usize, most: usize, workers: usize) -> impl Iterator<Item = usize> {
    let fewest = length.div_ceil(most).max(1);
    (fewest..=fewest + MAX_TASKS * workers).filter_map(move |parts| {
        let step = length.div_ceil(parts).next_multiple_of(unit).max(unit);
        (parts == fewest || step >= MIN_LENGTH).then_some(step)
    })
}
