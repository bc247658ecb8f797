//! The forward's launches.

use super::arguments::{
    CallSizes, DropoutArguments, Dropped, ForwardArguments, ForwardHopperArguments, Heads, Map,
    Strides,
};
use super::element;
use super::form::{Forward as Form, definitions, line, pointer_to};
use super::tiles::{self, compiled_head_dim};
use super::workspace::Workspace;
use crate::kernels::Mask;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::source::{Source, is_hopper, multiprocessors};
use crate::kernels::cuda::{View, set_to_zero};
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
        include_str!("hopper.cuh"),
        include_str!("forward_hopper.cu"),
    ],
};

/// What is read.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs<'a> {
    pub q: Heads<'a>,
    pub k: Heads<'a>,
    pub v: Heads<'a>,
    /// (B, Tq) u32, contiguous: a query of any head sees no key before the one that its sequence has there; it never
    /// falls from one query to the next.
    pub first_keys: Option<View<'a>>,
    /// Which probabilities are dropped, if any are.
    pub dropout: Option<Dropped<'a>>,
}

/// What is written.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    /// (B, H, Tq, Dh), as it lies.
    pub out: Heads<'a>,
    /// What rounding took from out, where that is wanted (of f32 it takes nothing): (B, H, Tq, Dh) contiguous, in its
    /// dtype.
    pub rounding_error: Option<View<'a>>,
    /// (B, H, Tq) f32.
    pub lse: View<'a>,
}

impl Outputs<'_> {
    /// Where what rounding took from out goes, or null.
    fn rounding_error(&self) -> u64 {
        self.rounding_error.map_or(0, |rest| rest.pointer)
    }
}

/// The kernel for every GPU, as it is compiled for such a call.
fn form_for(dtype: DType, tf32: bool, sizes: &Sizes) -> Form {
    let head_dim = compiled_head_dim(sizes.head_dim);
    if dtype == DType::F32 {
        return super::f32::forward(head_dim, tf32);
    }
    let tiles = tiles::Forward::new(head_dim, sizes.mask == Mask::Full);
    Form {
        source: &SOURCE,
        rows: tiles.rows,
        threads: 32 * tiles.warps,
        shared_bytes: tiles.shared_bytes(head_dim),
        tiles: tiles.definitions(),
    }
}

/// Tiles of Hopper's own kernel, where the GPU and the call have one.
fn of_hopper(gpu: &CudaDevice, dtype: DType, sizes: &Sizes) -> Option<tiles::ForwardHopper> {
    let head_dim = compiled_head_dim(sizes.head_dim);
    let tiles = tiles::ForwardHopper::new(head_dim, sizes.keys);
    tiles.filter(|_| dtype != DType::F32 && is_hopper(gpu))
}

/// Numbers from which Hopper's blocks draw their work.
const TICKETS: usize = 2;

/// Attention of q, k and v, products of f32 in TF32 or with f32's accuracy. `workspace`
/// ([`flash_forward`](crate::kernels::workspace::flash_forward)) u32 is room to work in; launches that may run beside
/// one another need their own.
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
    match of_hopper(gpu, inputs.q.view.dtype, sizes) {
        Some(tiles) => hopper(gpu, sizes, &tiles, inputs, outputs, workspace),
        None => launch_generic(gpu, sizes, tf32, inputs, outputs),
    }
}

/// What a block shares, for such a call.
pub(super) fn shared_bytes(gpu: &CudaDevice, dtype: DType, tf32: bool, sizes: &Sizes) -> usize {
    match of_hopper(gpu, dtype, sizes) {
        Some(tiles) => tiles.shared_bytes(compiled_head_dim(sizes.head_dim)),
        None => form_for(dtype, tf32, sizes).shared_bytes,
    }
}

fn launch_generic(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tf32: bool,
    inputs: ForwardInputs,
    outputs: Outputs,
) -> Result<()> {
    let ForwardInputs {
        q,
        k,
        v,
        first_keys,
        dropout,
    } = inputs;
    let form = form_for(q.view.dtype, tf32, sizes);
    let element = element(q.view.dtype);
    let drops = dropout.is_some();
    let definitions = definitions(sizes, element, first_keys, drops, form.tiles);
    let kernel = (form.source).kernel_with(gpu, &definitions, "flash_forward", element)?;
    kernel.allow_shared_bytes(form.shared_bytes)?;
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
    };
    let blocks = sizes.queries.div_ceil(form.rows) * all_heads;
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it says.
    unsafe { launch.launch(line(blocks, form.threads, form.shared_bytes)) }.w()?;
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
        dropout,
    } = inputs;
    let element = element(q.view.dtype);
    let drops = dropout.is_some();
    let definitions = definitions(sizes, element, first_keys, drops, tiles.definitions());
    let kernel = HOPPER.kernel_with(gpu, &definitions, "flash_forward_hopper", element)?;
    let shared_bytes = tiles.shared_bytes(compiled_head_dim(sizes.head_dim));
    kernel.allow_shared_bytes(shared_bytes)?;
    // As many heads as have their keys in the level-2 cache together.
    let at_once = ((1 << 24) / (sizes.keys * sizes.head_dim).max(1)).clamp(1, 64);
    let tickets = Workspace::new(workspace).take(TICKETS);
    set_to_zero(gpu, tickets)?;
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
        sizes: CallSizes::new(sizes, at_once),
        first_keys: pointer_to(first_keys),
        dropout: DropoutArguments::new(dropout),
    };
    let tiles_in_all = sizes.queries.div_ceil(tiles.rows()) * sizes.batch * sizes.heads;
    let blocks = tiles_in_all.min(multiprocessors(gpu)?);
    let mut launch = kernel.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it says.
    unsafe { launch.launch(line(blocks, tiles.threads(), shared_bytes)) }.w()?;
    Ok(())
}
