//! The forward's launches.

use super::arguments::{CallSizes, ForwardArguments, ForwardHopperArguments, Heads, Map, Strides};
use super::element;
use super::tiles::{self, compiled_head_dim};
use crate::kernels::Mask;
use crate::kernels::cpu::flash_attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::source::{Source, is_hopper, multiprocessors};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "flash_forward",
    parts: &[include_str!("common.cuh"), include_str!("forward.cu")],
};
const HOPPER: Source = Source {
    name: "flash_forward_hopper",
    parts: &[
        include_str!("common.cuh"),
        include_str!("hopper.cuh"),
        include_str!("forward_hopper.cu"),
    ],
};

/// out (B, H, Tq, Dh), what rounding took from it (as out, contiguous like out), and lse (B, H, Tq) f32.
pub(crate) fn forward(
    card: &CudaDevice,
    sizes: &Sizes,
    [q, k, v]: [Heads; 3],
    out: Heads,
    rounded_off: View,
    lse: View,
) -> Result<()> {
    let head_dim = compiled_head_dim(sizes.head_dim);
    let tiles = tiles::ForwardHopper::new(head_dim, sizes.keys).filter(|_| is_hopper(card));
    match tiles {
        Some(tiles) => hopper(
            card,
            sizes,
            head_dim,
            &tiles,
            [q, k, v],
            out,
            [rounded_off, lse],
        ),
        None => everywhere(card, sizes, head_dim, [q, k, v], out, [rounded_off, lse]),
    }
}

/// What a block shares, for such a call.
pub(super) fn shared_bytes(card: &CudaDevice, sizes: &Sizes) -> usize {
    let head_dim = compiled_head_dim(sizes.head_dim);
    match tiles::ForwardHopper::new(head_dim, sizes.keys).filter(|_| is_hopper(card)) {
        Some(tiles) => tiles.shared_bytes(head_dim),
        None => tiles::Forward::new(head_dim, sizes.mask == Mask::Full).shared_bytes(head_dim),
    }
}

/// Definitions that all kernels share.
pub(super) fn definitions(head_dim: usize, element: &str, tiles: Vec<String>) -> Vec<String> {
    let mut definitions = vec![format!("HEAD_DIM={head_dim}"), format!("ELEMENT={element}")];
    definitions.extend(tiles);
    definitions
}

/// A grid and blocks of one dimension.
pub(super) fn line(blocks: usize, threads: usize, shared_bytes: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared_bytes as u32,
    }
}

fn everywhere(
    card: &CudaDevice,
    sizes: &Sizes,
    head_dim: usize,
    [q, k, v]: [Heads; 3],
    out: Heads,
    [rounded_off, lse]: [View; 2],
) -> Result<()> {
    let tiles = tiles::Forward::new(head_dim, sizes.mask == Mask::Full);
    let element = element(q.view.dtype);
    let definitions = definitions(head_dim, element, tiles.definitions());
    let kernel = SOURCE.kernel_with(card, &definitions, &format!("flash_forward_{element}"))?;
    let shared_bytes = tiles.shared_bytes(head_dim);
    kernel.allow_shared_bytes(shared_bytes)?;
    let all_heads = sizes.batch * sizes.heads;
    let arguments = ForwardArguments {
        q: q.view.pointer,
        k: k.view.pointer,
        v: v.view.pointer,
        out: out.view.pointer,
        rounded_off: rounded_off.pointer,
        lse: lse.pointer,
        q_strides: Strides::from(&q),
        k_strides: Strides::from(&k),
        v_strides: Strides::from(&v),
        out_strides: Strides::from(&out),
        sizes: CallSizes::new(sizes, all_heads),
    };
    let blocks = sizes.queries.div_ceil(tiles.rows) * all_heads;
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it says.
    unsafe { launch.launch(line(blocks, 32 * tiles.warps, shared_bytes)) }.w()?;
    Ok(())
}

fn hopper(
    card: &CudaDevice,
    sizes: &Sizes,
    head_dim: usize,
    tiles: &tiles::ForwardHopper,
    [q, k, v]: [Heads; 3],
    out: Heads,
    [rounded_off, lse]: [View; 2],
) -> Result<()> {
    let element = element(q.view.dtype);
    let definitions = definitions(head_dim, element, tiles.definitions());
    let name = format!("flash_forward_hopper_{element}");
    let kernel = HOPPER.kernel_with(card, &definitions, &name)?;
    let shared_bytes = tiles.shared_bytes(head_dim);
    kernel.allow_shared_bytes(shared_bytes)?;
    // As many heads as have their keys in the level-2 cache together.
    let at_once = ((1 << 24) / (sizes.keys * sizes.head_dim).max(1)).clamp(1, 64);
    // Where blocks draw their numbers. A pair for each launch: others may run beside it, on other threads' streams.
    let tickets = card.alloc_zeros::<u32>(2)?;
    let arguments = ForwardHopperArguments {
        maps: [
            Map::new(&q, tiles.rows())?,
            Map::new(&k, tiles.columns)?,
            Map::new(&v, tiles.columns)?,
        ],
        out: out.view.pointer,
        rounded_off: rounded_off.pointer,
        lse: lse.pointer,
        tickets: tickets.device_ptr(&card.cuda_stream()).0,
        out_strides: Strides::from(&out),
        sizes: CallSizes::new(sizes, at_once),
    };
    let tiles_in_all = sizes.queries.div_ceil(tiles.rows()) * sizes.batch * sizes.heads;
    let blocks = tiles_in_all.min(multiprocessors(card)?);
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it says.
    unsafe { launch.launch(line(blocks, tiles.threads(), shared_bytes)) }.w()?;
    Ok(())
}
