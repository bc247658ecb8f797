//! Embedding: lookup of table rows by id, and the gradient of the table.

use crate::kernels::cpu::{
    Blocks, Real, Stored,
    parallel::{self, Shared, TASK_ELEMENTS},
    simd,
};
use std::ops::Range;

/// Copies `y[i] = table[ids[i]]`; table (vocab, width), y (ids, width). Ids must be inside the table.
pub fn forward<T: Copy + Send + Sync>(table: &[T], width: usize, ids: &[u32], y: &mut [T]) {
    parallel::for_rows(y, width, |first, y| {
        for (y, id) in y.chunks_exact_mut(width).zip(&ids[first..]) {
            let start = *id as usize * width;
            y.copy_from_slice(&table[start..start + width]);
        }
    });
}

/// Computes `dtable[id]`, the sum in order of `dy[i]` over the positions i of that id, or 0; dtable (vocab, width), dy
/// (ids, width). The row of `padding_id` is 0.
///
/// Parallel over blocks of columns: each task reads all ids, so every element is summed by one task in the order of the
/// ids.
pub fn backward<T: Stored>(
    dy: &[T],
    width: usize,
    ids: &[u32],
    padding_id: Option<u32>,
    dtable: &mut [T],
) {
    parallel::for_rows(dtable, width, |_, rows| rows.fill(T::zero()));
    add_rows(dy, width, ids, padding_id, dtable, false);
}

/// Adds the gradient that [`backward`] computes to `dtable`.
pub fn backward_accumulating<T: Real + Stored<Wide = T>>(
    dy: &[T],
    width: usize,
    ids: &[u32],
    padding_id: Option<u32>,
    dtable: &mut [T],
) {
    add_rows(dy, width, ids, padding_id, dtable, true);
}

/// Computes the rows of `dtable` whose ids occur; with `accumulate`, for types stored in the compute type, adds to
/// them.
fn add_rows<T: Stored>(
    dy: &[T],
    width: usize,
    ids: &[u32],
    padding_id: Option<u32>,
    dtable: &mut [T],
    accumulate: bool,
) {
    if width == 0 {
        return;
    }
    let mut positions = Positions::of(ids, dtable.len() / width);
    positions
        .of_ids
        .retain(|(id, _)| padding_id.is_none_or(|padding| *id != padding as usize));
    // Blocks have at least a cache line and there are at most eight, because each costs another pass over the ids.
    let block = width.div_ceil(8).next_multiple_of(16).min(width);
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
                let mut reading = Blocks::<T, 1, 0>::new();
                let mut writing = Blocks::<T, 0, 1>::new();
                for (id, occurrences) in &positions.of_ids {
                    let occurrences = &positions.sorted[occurrences.clone()];
                    // SAFETY: only this task accesses its columns.
                    let row = unsafe { dtable.range(id * width + from, len) };
                    writing.each(
                        [],
                        [row],
                        #[inline(always)]
                        |start, [], [sum]| {
                            if !accumulate {
                                sum.fill(T::Wide::ZERO);
                            }
                            for position in occurrences {
                                let at = position * width + from + start;
                                reading.each(
                                    [&dy[at..at + sum.len()]],
                                    [],
                                    #[inline(always)]
                                    |start, [dy], []| {
                                        for (sum, dy) in sum[start..].iter_mut().zip(dy) {
                                            *sum += *dy;
                                        }
                                    },
                                );
                            }
                        },
                    );
                }
            },
        );
    });
}

/// The positions of each id.
struct Positions {
    /// The positions of id 0 in order, then those of id 1, and so on.
    sorted: Vec<usize>,
    /// Each id that occurs, and the range of its positions in `sorted`.
    of_ids: Vec<(usize, Range<usize>)>,
}

impl Positions {
    fn of(ids: &[u32], vocab_size: usize) -> Self {
        let mut next = vec![0; vocab_size];
        for id in ids {
            next[*id as usize] += 1;
        }
        // Turn counts into the offsets where each id's positions begin.
        let mut begin = 0;
        let mut of_ids = Vec::new();
        for (id, next) in next.iter_mut().enumerate() {
            let count = std::mem::replace(next, begin);
            if count > 0 {
                of_ids.push((id, begin..begin + count));
            }
            begin += count;
        }
        // Each position advances its id's offset by one.
        let mut sorted = vec![0; ids.len()];
        for (position, id) in ids.iter().enumerate() {
            let next = &mut next[*id as usize];
            sorted[*next] = position;
            *next += 1;
        }
        Self { sorted, of_ids }
    }
}
