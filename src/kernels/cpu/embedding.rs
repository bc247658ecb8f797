//! Rows of a table by id, and their gradients back into the table.

use super::{
    Real,
    parallel::{self, Shared, TASK_ELEMENTS},
    simd,
};

/// `y[i] = table[ids[i]]`; table (vocab, width), y (ids, width). Ids must be inside the table.
pub fn forward<T: Real>(table: &[T], width: usize, ids: &[u32], y: &mut [T]) {
    parallel::for_rows(y, width, |first, y| {
        for (y, id) in y.chunks_exact_mut(width).zip(&ids[first..]) {
            let start = *id as usize * width;
            y.copy_from_slice(&table[start..start + width]);
        }
    });
}

/// `dtable = 0`, then `dtable[ids[i]] += dy[i]` for i in order; dtable (vocab, width), dy (ids, width).
///
/// Parallel over column blocks: each task walks all ids, so every element is summed by one task, in the ids' order.
pub fn backward<T: Real>(dy: &[T], width: usize, ids: &[u32], dtable: &mut [T]) {
    parallel::for_rows(dtable, width, |_, rows| rows.fill(T::ZERO));
    // At least a cache line and at most eight blocks: each costs another walk over the ids.
    let block = width.div_ceil(8).next_multiple_of(16).min(width.max(1));
    let tasks = if ids.len() * width < TASK_ELEMENTS {
        1
    } else {
        width.div_ceil(block)
    };
    let block = if tasks == 1 { width } else { block };
    let dtable = Shared::new(dtable);
    parallel::for_tasks(tasks, |task| {
        let from = task * block;
        let len = block.min(width - from);
        simd::vectorized(
            #[inline(always)]
            || {
                for (id, dy) in ids.iter().zip(dy.chunks_exact(width.max(1))) {
                    // SAFETY: this task alone touches its columns.
                    let row = unsafe { dtable.range(*id as usize * width + from, len) };
                    for (sum, dy) in row.iter_mut().zip(&dy[from..from + len]) {
                        *sum += *dy;
                    }
                }
            },
        );
    });
}
