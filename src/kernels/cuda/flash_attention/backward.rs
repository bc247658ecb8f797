//! Launches of backward: row statistics, gradients, and dq rounded.

use super::arguments::{BackwardArguments, BackwardMaps, Heads, Map, ProbabilityDropout};
use super::element;
use super::kernel_config::{Backward as KernelConfig, config_1d, definitions};
use super::masks::{MaskArguments, MaskTiles, Masks};
use super::tiles::{self, compiled_head_dim};
use super::workspace::Workspace;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::kernel::Kernel;
use crate::kernels::cuda::source::{Source, is_hopper, multiprocessors};
use crate::kernels::cuda::{View, in_vector};
use crate::kernels::workspace::MaskRows;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "flash_backward",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("backward.cuh"),
        include_str!("backward.cu"),
    ],
};
const HOPPER: Source = Source {
    name: "flash_backward_hopper",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("hopper.cuh"),
        include_str!("backward.cuh"),
        include_str!("backward_works.cuh"),
        include_str!("backward_hopper.cuh"),
        include_str!("backward_hopper.cu"),
    ],
};
const CLUSTER: Source = Source {
    name: "flash_backward_cluster",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("hopper.cuh"),
        include_str!("backward.cuh"),
        include_str!("backward_works.cuh"),
        include_str!("backward_cluster.cuh"),
        include_str!("backward_cluster.cu"),
    ],
};

/// The inputs of backward.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub q: Heads<'a>,
    pub k: Heads<'a>,
    pub v: Heads<'a>,
    pub out: Heads<'a>,
    /// The rounding error of out, if it was saved (in f32 there is none): (B, H, Tq, Dv) contiguous.
    pub rounding_error: Option<View<'a>>,
    pub d_out: Heads<'a>,
    /// (parts, B, H, Tq) f32.
    pub lse: View<'a>,
    /// (B, Tq) u32, contiguous, as in forward.
    pub first_keys: Option<View<'a>>,
    pub masks: Masks<'a>,
    /// The dropout of the probabilities, as in forward.
    pub dropout: Option<ProbabilityDropout<'a>>,
}

/// The outputs of backward.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    pub dq: Heads<'a>,
    pub dk: Heads<'a>,
    pub dv: Heads<'a>,
}

/// Returns the kernels for every GPU and their launch sizes, for a call.
fn generic_kernels(dtype: DType, tf32: bool, head_dim: usize) -> KernelConfig {
    if dtype == DType::F32 {
        return super::f32::backward(head_dim, tf32);
    }
    let tiles = tiles::Backward::new(head_dim);
    let threads = 32 * tiles.warps;
    KernelConfig {
        source: &SOURCE,
        keys: tiles.keys,
        queries: tiles.queries,
        threads,
        shared_bytes: tiles.shared_bytes(head_dim),
        finish: (threads, tiles.queries * head_dim * 2),
        tiles: tiles.definitions(),
    }
}

/// Returns the tiles of the Hopper kernels, if the GPU and the call have them. They compute the slope of a soft cap
/// from the probabilities, which must not contain a bias.
fn hopper_tiles(
    gpu: &CudaDevice,
    dtype: DType,
    sizes: &Sizes,
    masks: &Masks<'_>,
) -> Option<tiles::BackwardHopper> {
    let tiles = tiles::BackwardHopper::new(compiled_head_dim(sizes));
    let suits = masks.bias.is_none() || sizes.soft_cap.is_none();
    tiles.filter(|_| suits && dtype != DType::F32 && is_hopper(gpu))
}

/// Returns the shared memory of a block, in bytes.
pub(super) fn shared_bytes(gpu: &CudaDevice, dtype: DType, tf32: bool, sizes: &Sizes) -> usize {
    let head_dim = compiled_head_dim(sizes);
    let generic = generic_kernels(dtype, tf32, head_dim).shared_bytes;
    match hopper_tiles(gpu, dtype, sizes, &Masks::default()) {
        Some(tiles) => generic.max(tiles.shared_bytes(head_dim)),
        None => generic,
    }
}

/// Returns the words of the statistics (at most three per query), of the sums of dq, and of the turns: two per tile of
/// queries, since the Hopper kernel adds its halves separately, and a ticket.
fn parts(tiles_of_queries: usize, queries: usize, head_dim: usize) -> [usize; 3] {
    let rows = tiles_of_queries * queries;
    [3 * rows, rows * head_dim, 2 * tiles_of_queries + 1]
}

/// Returns the number of tiles of queries over all heads.
pub(super) fn tiles_of_queries(sizes: &Sizes, queries: usize) -> usize {
    sizes.batch * sizes.heads * sizes.queries.div_ceil(queries)
}

/// Returns the number of blocks of `flash_backward_prepare`.
pub(super) fn prepare_blocks(
    dtype: DType,
    head_dim: usize,
    tiles_of_queries: usize,
    rows: usize,
) -> usize {
    let lanes_a_row = (head_dim / in_vector(dtype)).next_power_of_two().min(32);
    let of_turns = (2 * tiles_of_queries + 1).div_ceil(256);
    rows.div_ceil(256 / lanes_a_row).max(of_turns)
}

/// Computes the gradients of q, k and v. `tf32` must be that of forward. `workspace` u32 is scratch of
/// [`flash_backward`](crate::kernels::workspace::flash_backward) words.
pub(crate) fn backward(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tf32: bool,
    inputs: Inputs,
    gradients: Gradients,
    workspace: View,
) -> Result<()> {
    let head_dim = compiled_head_dim(sizes);
    let dtype = inputs.q.view.dtype;
    let element = element(dtype);
    let drops = inputs.dropout.is_some();
    let hopper = hopper_tiles(gpu, dtype, sizes, &inputs.masks);
    let generic = generic_kernels(dtype, tf32, head_dim);
    let hopper_keys = tiles::BackwardHopper::KEYS;
    let (source, tiles, queries, keys) = match &hopper {
        Some(tiles) => {
            let source = if tiles.cluster == 1 {
                &HOPPER
            } else {
                &CLUSTER
            };
            (source, tiles.definitions(), tiles.queries, hopper_keys)
        }
        None => (
            generic.source,
            generic.tiles.clone(),
            generic.queries,
            generic.keys,
        ),
    };
    let (first_keys, masks) = (inputs.first_keys, &inputs.masks);
    let definitions = definitions(sizes, element, first_keys, masks, drops, tiles);
    let kernel = |stem| source.kernel_with(gpu, &definitions, stem, element);

    let tiles_of_queries = tiles_of_queries(sizes, queries);
    let rows = tiles_of_queries * queries;
    // `prepare` writes statistics and turns. The first tile of keys overwrites its part of the sums.
    let mut scratch = Workspace::new(workspace);
    let parts = parts(tiles_of_queries, queries, head_dim).map(|len| scratch.take(len).pointer);
    let heads_at_once = match &hopper {
        Some(tiles) => tiles.heads_at_once(sizes),
        None => sizes.batch * sizes.kv_heads,
    };
    let mask_tiles = MaskTiles {
        queries,
        keys,
        rows: MaskRows::Keys,
    };
    let of_masks = MaskArguments::new(gpu, sizes, masks, mask_tiles, &mut scratch)?;
    let arguments = BackwardArguments::new(
        sizes,
        &inputs,
        Some(&gradients),
        parts,
        of_masks,
        heads_at_once,
    );
    let run = |kernel: &Kernel, blocks, threads, shared_bytes| -> Result<()> {
        kernel.allow_shared_bytes(shared_bytes)?;
        let mut launch = kernel.builder();
        launch.arg(&arguments);
        // SAFETY: the argument is the kernel's, over tensors of the sizes that it states.
        unsafe { launch.launch(config_1d(blocks, threads, shared_bytes)) }.w()?;
        Ok(())
    };

    let blocks = prepare_blocks(dtype, head_dim, tiles_of_queries, rows);
    run(&kernel("flash_backward_prepare")?, blocks, 256, 0)?;
    match hopper {
        Some(tiles) => {
            let block_keys = keys / tiles.cluster;
            let maps = BackwardMaps([
                Map::new(&inputs.q, queries)?,
                Map::new(&inputs.k, block_keys)?,
                Map::new(&inputs.v, block_keys)?,
                Map::new(&inputs.d_out, queries)?,
            ]);
            let matmul_kernel = kernel("flash_backward_hopper")?;
            let shared_bytes = tiles.shared_bytes(head_dim);
            matmul_kernel.allow_shared_bytes(shared_bytes)?;
            let works = sizes.keys.div_ceil(keys) * sizes.batch * sizes.kv_heads;
            let blocks = tiles.cluster * works.min(multiprocessors(gpu)? / tiles.cluster);
            let mut launch = matmul_kernel.builder();
            launch.arg(&maps).arg(&arguments);
            // SAFETY: as above.
            unsafe { launch.launch(config_1d(blocks, 384, shared_bytes)) }.w()?;
            match masks.visible {
                Some(_) => {
                    let finish = kernel("flash_backward_finish")?;
                    run(&finish, tiles_of_queries + works, 256, 0)
                }
                None => Ok(()),
            }
        }
        None => {
            let blocks = sizes.keys.div_ceil(keys) * sizes.batch * sizes.kv_heads;
            run(
                &kernel("flash_backward")?,
                blocks,
                generic.threads,
                generic.shared_bytes,
            )?;
            let (threads, shared_bytes) = generic.finish;
            run(
                &kernel("flash_backward_finish")?,
                tiles_of_queries,
                threads,
                shared_bytes,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Mask, workspace};

    /// The tiles of the Hopper kernels fit in the shared memory of its blocks; otherwise calls would have no kernel.
    #[test]
    fn the_tiles_of_hopper_fit() {
        for head_dim in [64, 128, 256] {
            let tiles = tiles::BackwardHopper::new(head_dim).expect("a Hopper kernel");
            let bytes = tiles.shared_bytes(head_dim);
            assert!(
                bytes <= 227 * 1024,
                "head dimension {head_dim}: {bytes} bytes"
            );
        }
    }

    /// The planned size holds the parts of every kernel, wherever the workspace begins.
    #[test]
    fn the_workspace_holds_all_parts() {
        for head_dim in 1..=256 {
            for queries in [1, 31, 33, 64, 65, 96, 127, 129, 1000] {
                let sizes = Sizes {
                    batch: 3,
                    heads: 5,
                    kv_heads: 5,
                    queries,
                    keys: 7,
                    head_dim,
                    value_dim: head_dim,
                    mask: Mask::Full,
                    scale: 1.0,
                    soft_cap: None,
                };
                let compiled = compiled_head_dim(&sizes);
                let generic = [
                    (DType::BF16, false),
                    (DType::F32, false),
                    (DType::F32, true),
                ];
                let generic =
                    generic.map(|(dtype, tf32)| generic_kernels(dtype, tf32, compiled).queries);
                let hopper = tiles::BackwardHopper::new(compiled).map(|tiles| tiles.queries);
                for tile in generic.into_iter().chain(hopper) {
                    let words = workspace::flash_backward(&sizes, None);
                    let odd = View::new(4, DType::U32, words); // begins a word after a multiple of 256 bytes
                    let end = odd.pointer + 4 * words as u64;
                    let mut scratch = Workspace::new(odd);
                    let parts = parts(tiles_of_queries(&sizes, tile), tile, compiled);
                    for part in parts.map(|len| scratch.take(len)) {
                        let part_end = part.pointer + 4 * part.len as u64;
                        assert!(part_end <= end, "{sizes:?}, tiles of {tile}");
                    }
                }
            }
        }
    }
}
