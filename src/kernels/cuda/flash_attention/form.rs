//! What a kernel is compiled with, and what a launch of it takes.

use super::tiles::compiled_head_dim;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::source::{Definition, Source};
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

/// A kernel for every GPU as it is compiled for a call, and what a launch of it takes.
pub(super) struct Forward {
    pub source: &'static Source,
    /// Queries of a block.
    pub rows: usize,
    pub threads: usize,
    pub shared_bytes: usize,
    pub tiles: Vec<Definition>,
}

/// Kernels for every GPU as they are compiled for a call, and what their launches take.
pub(super) struct Backward {
    pub source: &'static Source,
    /// Of a block.
    pub keys: usize,
    /// Of a tile.
    pub queries: usize,
    pub threads: usize,
    pub shared_bytes: usize,
    /// Threads and shared bytes of the kernel that goes last.
    pub finish: (usize, usize),
    pub tiles: Vec<Definition>,
}

/// Definitions that all kernels share. Without first keys, of which a window makes some, the kernels have no code for
/// them; nor for dropout where nothing is dropped, nor for a cap where there is none.
pub(super) fn definitions(
    sizes: &Sizes,
    element: &'static str,
    first_keys: Option<View>,
    drops: bool,
    mut tiles: Vec<Definition>,
) -> Vec<Definition> {
    let head_dim = compiled_head_dim(sizes.head_dim);
    let first_keys = first_keys.is_some() || sizes.mask.window().is_some();
    tiles.push(Definition::Size("FIRST_KEYS", usize::from(first_keys)));
    tiles.push(Definition::Size("DROPOUT", usize::from(drops)));
    tiles.push(Definition::Size(
        "SOFT_CAP",
        usize::from(sizes.soft_cap.is_some()),
    ));
    tiles.push(Definition::Size("HEAD_DIM", head_dim));
    tiles.push(Definition::Type("ELEMENT", element));
    tiles
}

/// Where first keys lie, or null.
pub(super) fn pointer_to(first_keys: Option<View>) -> u64 {
    first_keys.map_or(0, |first_keys| first_keys.pointer)
}

/// A grid and blocks of one dimension.
pub(super) fn line(blocks: usize, threads: usize, shared_bytes: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared_bytes as u32,
    }
}
