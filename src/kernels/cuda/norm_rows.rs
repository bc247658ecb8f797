//! The launch configuration of the norms; see `norm_rows.cuh`.

use super::{View, in_vector, launch_config, packs};
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

/// The start of the norms' sources, after the prelude.
pub(super) const ROWS: &str = include_str!("norm_rows.cuh");

/// Columns per thread, as in the source.
const OF_THREAD: usize = 16;

/// The most threads per block.
const OF_BLOCK: usize = 512;

/// Returns the configuration for the rows of `y` (rows, width), whose dtype is the narrower one and decides the columns
/// of a thread. Rows wider than the kernels support get more threads than a block may have; the driver refuses them.
pub(super) fn threads_for_rows(y: View, width: usize) -> LaunchConfig {
    let threads = |columns: usize| 32 * columns.div_ceil(32 * OF_THREAD);
    let of_packs = threads(packs(width, y) * in_vector(y.dtype));
    let of_row = of_packs.min(OF_BLOCK).max(threads(width));
    let of_block = (128 / of_row).max(1);
    launch_config(((y.len / width).div_ceil(of_block), 1), (of_row, of_block))
}
