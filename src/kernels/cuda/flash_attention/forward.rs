//! Launches of forward.

use super::arguments::{
    CallSizes, DropoutArguments, ForwardArguments, ForwardHopperArguments, Heads, Map,
    ProbabilityDropout, Strides,
};
use super::element;
use super::kernel_config::{Forward as KernelConfig, config_1d, definitions, pointer_to};
use super::masks::{MaskArguments, MaskTiles, Masks};
use super::tiles::{self, compiled_head_dim};
use super::workspace::Workspace;
use crate::kernels::Mask;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::source::{Source, is_hopper, multiprocessors};
use crate::kernels::cuda::{View, set_to_zero};
use crate::kernels::workspace::{FORWARD_TICKETS, MaskRows};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "flash_forward",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("forward.cu"),
    ],
};
const HOPPER: Source = Source {
    name: "flash_forward_hopper",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("hopper.cuh"),
        include_str!("forward_hopper.cu"),
    ],
};

/// The inputs of forward.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs<'a> {
    pub q: Heads<'a>,
    pub k: Heads<'a>,
    pub v: Heads<'a>,
    /// (B, Tq) u32, contiguous: the first key of each query of a sequence, the same for all heads, never decreasing.
    pub first_keys: Option<View<'a>>,
    pub masks: Masks<'a>,
    /// The dropout of the probabilities, if there is any.
    pub dropout: Option<ProbabilityDropout<'a>>,
}

/// The outputs of forward.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    /// (B, H, Tq, Dv), strided.
    pub out: Heads<'a>,
    /// The rounding error of out, if it is needed (in f32 there is none): (B, H, Tq, Dv) contiguous, in out's dtype.
    pub rounding_error: Option<View<'a>>,
    /// (B, H, Tq) f32; for heads in f32 followed by the rounding error of lse, in the same shape.
    pub lse: View<'a>,
}

impl Outputs<'_> {
    /// Returns the address of the rounding error of out, or null.
    fn rounding_error(&self) -> u64 {
        self.rounding_error.map_or(0, |rest| rest.pointer)
    }
}

/// Returns the kernel for every GPU and its launch sizes, for a call.
fn generic_kernel(dtype: DType, tf32: bool, sizes: &Sizes, masks: &Masks<'_>) -> KernelConfig {
    let head_dim = compiled_head_dim(sizes);
    if dtype == DType::F32 {
        return super::f32::forward(head_dim, tf32, masks.visible.is_some());
    }
    let tiles = tiles::Forward::new(head_dim, sizes.mask == Mask::Full);
    KernelConfig {
        source: &SOURCE,
        rows: tiles.rows,
        columns: tiles.columns,
        threads: 32 * tiles.warps,
        shared_bytes: tiles.shared_bytes(head_dim),
        tiles: tiles.definitions(),
    }
}

/// Returns the tiles of the Hopper kernel, if the GPU and the call have one.
fn hopper_tiles(
    gpu: &CudaDevice,
    dtype: DType,
    sizes: &Sizes,
    masks: &Masks<'_>,
) -> Option<tiles::ForwardHopper> {
    let head_dim = compiled_head_dim(sizes);
    let tiles = tiles::ForwardHopper::new(head_dim, sizes.keys, masks.are_of_pairs());
    tiles.filter(|_| dtype != DType::F32 && is_hopper(gpu))
}

/// Computes the attention of q, k and v. `tf32` selects TF32 or the accuracy of f32 for heads in f32. `workspace` u32
/// is scratch of [`flash_forward`](crate::kernels::workspace::flash_forward) words; concurrent launches need one each.
pub(crate) fn forward(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tf32: bool,
    inputs: ForwardInputs,
    outputs: Outputs,
    workspace: View,
) -> Result<()> {
    let first_keys = inputs.first_keys;
    debug_assert!(first_keys.is_none_or(|all| all.len == sizes.batch * sizes.queries));
    match hopper_tiles(gpu, inputs.q.view.dtype, sizes, &inputs.masks) {
        Some(tiles) => hopper(gpu, sizes, &tiles, inputs, outputs, workspace),
        None => launch_generic(gpu, sizes, tf32, inputs, outputs, workspace),
    }
}

/// Returns the shared memory of a block, in bytes; with masks it is no more.
pub(super) fn shared_bytes(gpu: &CudaDevice, dtype: DType, tf32: bool, sizes: &Sizes) -> usize {
    let none = Masks::default();
    match hopper_tiles(gpu, dtype, sizes, &none) {
        Some(tiles) => tiles.shared_bytes(compiled_head_dim(sizes)),
        None => generic_kernel(dtype, tf32, sizes, &none).shared_bytes,
    }
}

fn launch_generic(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tf32: bool,
    inputs: ForwardInputs,
    outputs: Outputs,
    workspace: View,
) -> Result<()> {
    let ForwardInputs {
        q,
        k,
        v,
        first_keys,
        masks,
        dropout,
    } = inputs;
    let generic = generic_kernel(q.view.dtype, tf32, sizes, &masks);
    let element = element(q.view.dtype);
    let drops = dropout.is_some();
    let definitions = definitions(sizes, element, first_keys, &masks, drops, generic.tiles);
    let mask_tiles = MaskTiles {
        queries: generic.rows,
        keys: generic.columns,
        rows: MaskRows::Queries,
    };
    let mut scratch = Workspace::new(workspace);
    let masks = MaskArguments::new(gpu, sizes, &masks, mask_tiles, &mut scratch)?;
    let kernel = (generic.source).kernel_with(gpu, &definitions, "flash_forward", element)?;
    kernel.allow_shared_bytes(generic.shared_bytes)?;
    let all_heads = sizes.batch * sizes.heads;
    let arguments = ForwardArguments {
        q: q.view.pointer,
        k: k.view.pointer,
        v: v.view.pointer,
        out: outputs.out.view.pointer,
        rounding_error: outputs.rounding_error(),
        lse: outputs.lse.pointer,
        q_strides: Strides::from(&q),
        k_strides: Strides::from(&k),
        v_strides: Strides::from(&v),
        out_strides: Strides::from(&outputs.out),
        sizes: CallSizes::new(sizes, all_heads),
        first_keys: pointer_to(first_keys),
        dropout: DropoutArguments::new(dropout),
        masks,
    };
    let blocks = sizes.queries.div_ceil(generic.rows) * all_heads;
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it states.
    unsafe { launch.launch(config_1d(blocks, generic.threads, generic.shared_bytes)) }.w()?;
    Ok(())
}

fn hopper(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tiles: &tiles::ForwardHopper,
    inputs: ForwardInputs,
    outputs: Outputs,
    workspace: View,
) -> Result<()> {
    let ForwardInputs {
        q,
        k,
        v,
        first_keys,
        masks,
        dropout,
    } = inputs;
    let element = element(q.view.dtype);
    let drops = dropout.is_some();
    let definitions = definitions(
        sizes,
        element,
        first_keys,
        &masks,
        drops,
        tiles.definitions(),
    );
    let kernel = HOPPER.kernel_with(gpu, &definitions, "flash_forward_hopper", element)?;
    let shared_bytes = tiles.shared_bytes(compiled_head_dim(sizes));
    kernel.allow_shared_bytes(shared_bytes)?;
    // As many heads as fit in the level-2 cache with their keys.
    let heads_at_once = ((1 << 24) / (sizes.keys * sizes.widest()).max(1)).clamp(1, 64);
    let mut scratch = Workspace::new(workspace);
    let tickets = scratch.take(FORWARD_TICKETS);
    set_to_zero(gpu, tickets)?;
    let mask_tiles = MaskTiles {
        queries: tiles.rows(),
        keys: tiles.columns,
        rows: MaskRows::Queries,
    };
    let masks = MaskArguments::new(gpu, sizes, &masks, mask_tiles, &mut scratch)?;
    let arguments = ForwardHopperArguments {
        maps: [
            Map::new(&q, tiles.rows())?,
            Map::new(&k, tiles.columns)?,
            Map::new(&v, tiles.columns)?,
        ],
        out: outputs.out.view.pointer,
        rounding_error: outputs.rounding_error(),
        lse: outputs.lse.pointer,
        tickets: tickets.pointer,
        out_strides: Strides::from(&outputs.out),
        sizes: CallSizes::new(sizes, heads_at_once),
        first_keys: pointer_to(first_keys),
        dropout: DropoutArguments::new(dropout),
        masks,
    };
    let tiles_in_all = sizes.queries.div_ceil(tiles.rows()) * sizes.batch * sizes.heads;
    let blocks = tiles_in_all.min(multiprocessors(gpu)?);
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it states.
    unsafe { launch.launch(config_1d(blocks, tiles.threads(), shared_bytes)) }.w()?;
    Ok(())
}
