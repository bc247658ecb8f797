//! Compile-time definitions and launch sizes of the kernels.

use super::masks::Masks;
use super::tiles::compiled_head_dim;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::source::{Definition, Source};
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

/// A forward kernel for every GPU, as opposed to Hopper's: its source, definitions and launch sizes.
pub(super) struct Forward {
    pub source: &'static Source,
    /// Queries per block.
    pub rows: usize,
    /// Keys per tile.
    pub columns: usize,
    pub threads: usize,
    pub shared_bytes: usize,
    pub tiles: Vec<Definition>,
}

/// Backward kernels for every GPU: their source, definitions and launch sizes.
pub(super) struct Backward {
    pub source: &'static Source,
    /// Keys per block.
    pub keys: usize,
    /// Queries per tile.
    pub queries: usize,
    pub threads: usize,
    pub shared_bytes: usize,
    /// Threads and shared bytes of `flash_backward_finish`.
    pub finish: (usize, usize),
    pub tiles: Vec<Definition>,
}

/// Returns the definitions that all kernels share. The code for first keys (which windows use too), masks, biases,
/// dropout and a soft cap is compiled only if the call has them.
pub(super) fn definitions(
    sizes: &Sizes,
    element: &'static str,
    first_keys: Option<View>,
    masks: &Masks<'_>,
    drops: bool,
    mut tiles: Vec<Definition>,
) -> Vec<Definition> {
    let head_dim = compiled_head_dim(sizes);
    let first_keys = first_keys.is_some() || sizes.mask.window().is_some();
    let options = [
        ("FIRST_KEYS", first_keys),
        ("KEY_MASK", masks.visible.is_some()),
        ("BIAS", masks.bias.is_some()),
        ("DROPOUT", drops),
        ("SOFT_CAP", sizes.soft_cap.is_some()),
    ];
    tiles.extend(options.map(|(name, is_set)| Definition::Size(name, usize::from(is_set))));
    tiles.push(Definition::Size("HEAD_DIM", head_dim));
    tiles.push(Definition::Type("ELEMENT", element));
    let of_bias = masks.bias.map_or(DType::F32, |bias| bias.view.dtype);
    tiles.push(Definition::Type("TERM", super::element(of_bias)));
    tiles
}

/// Returns the address of the first keys, or null.
pub(super) fn pointer_to(first_keys: Option<View>) -> u64 {
    first_keys.map_or(0, |first_keys| first_keys.pointer)
}

/// Returns a configuration with a one-dimensional grid and block.
pub(super) fn config_1d(blocks: usize, threads: usize, shared_bytes: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared_bytes as u32,
    }
}
