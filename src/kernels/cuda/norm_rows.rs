//! How the norms spread rows over threads; see `norm_rows.cuh`.

use super::{View, in_vector, launch_config, packs};
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

/// What the norms' sources begin with, after the prelude.
pub(super) const ROWS: &str = include_str!("norm_rows.cuh");

/// Columns of a thread, as in the source.
const OF_THREAD: usize = 16;

/// The threads that a block may have.
const OF_BLOCK: usize = 512;

/// Threads for every row of `y` (rows, width), which is in the narrower dtype and decides what columns a thread has.
/// Rows wider than the kernels take get more than a block may have, which the driver refuses.
pub(super) fn threads_for_rows(y: View, width: usize) -> LaunchConfig {
    let threads = |columns: usize| 32 * columns.div_ceil(32 * OF_THREAD);
    let of_packs = threads(packs(width, y) * in_vector(y.dtype));
    let of_row = of_packs.min(OF_BLOCK).max(threads(width));
    let of_block = (128 / of_row).max(1);
    launch_config(((y.len / width).div_ceil(of_block), 1), (of_row, of_block))
}
