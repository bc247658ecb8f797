//! Launches of the gradient of a bias: row statistics, then the sums.

use super::arguments::BackwardArguments;
use super::backward::{Inputs, prepare_blocks, tiles_of_queries};
use super::element;
use super::kernel_config::{config_1d, definitions};
use super::masks::{MaskArguments, MaskTiles, PerScore};
use super::tiles::{self, compiled_head_dim};
use super::workspace::Workspace;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::source::Source;
use crate::kernels::workspace::{BIAS_GRADIENT_QUERIES, MaskRows, bias_gradient_statistics};
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "flash_bias_gradient",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("backward.cuh"),
        include_str!("bias_gradient.cu"),
    ],
};
const OF_F32: Source = Source {
    name: "flash_bias_gradient_f32",
    parts: &[
        include_str!("../philox.cuh"),
        include_str!("../dropout.cuh"),
        include_str!("common.cuh"),
        include_str!("dropped.cuh"),
        include_str!("masks.cuh"),
        include_str!("backward.cuh"),
        include_str!("f32/tf32.cuh"),
        include_str!("bias_gradient.cu"),
    ],
};

#[repr(C)]
#[derive(Clone, Copy)]
struct BiasGradientArguments {
    d_bias: u64,
    /// B, H, Tq, Tk, or 1.
    dims: [i32; 4],
    unused: i64,
}

// SAFETY: plain data with the layout that the source declares.
unsafe impl DeviceRepr for BiasGradientArguments {}

/// Computes the gradient `d_bias`, in the dtype of the bias, of the bias of a call. `tf32` must be that of forward. `workspace` u32 is scratch
/// of [`flash_bias_gradient`](crate::kernels::workspace::flash_bias_gradient) words.
pub(crate) fn bias_gradient(
    gpu: &CudaDevice,
    sizes: &Sizes,
    tf32: bool,
    inputs: Inputs,
    d_bias: PerScore,
    workspace: View,
) -> Result<()> {
    let head_dim = compiled_head_dim(sizes);
    let dtype = inputs.q.view.dtype;
    let element = element(dtype);
    let (source, tiles) = match dtype {
        DType::F32 => (&OF_F32, tiles::BiasGradient::of_f32(head_dim, tf32)),
        _ => (&SOURCE, tiles::BiasGradient::of_half(head_dim)),
    };
    let drops = inputs.dropout.is_some();
    let definitions = definitions(
        sizes,
        element,
        inputs.first_keys,
        &inputs.masks,
        drops,
        tiles.definitions(),
    );
    let kernel = |stem| source.kernel_with(gpu, &definitions, stem, element);

    let mut scratch = Workspace::new(workspace);
    let [statistics, turns] = bias_gradient_statistics(sizes).map(|len| scratch.take(len).pointer);
    let mask_tiles = MaskTiles {
        queries: BIAS_GRADIENT_QUERIES,
        keys: tiles.keys,
        rows: MaskRows::Queries,
    };
    let masks = MaskArguments::new(gpu, sizes, &inputs.masks, mask_tiles, &mut scratch)?;
    let scratch = [statistics, 0, turns];
    let arguments = BackwardArguments::new(sizes, &inputs, None, scratch, masks, 1);
    let of_bias = BiasGradientArguments {
        d_bias: d_bias.view.pointer,
        dims: d_bias.dims.map(|size| size as i32),
        unused: 0,
    };

    let tiles_of_queries = tiles_of_queries(sizes, BIAS_GRADIENT_QUERIES);
    let blocks = prepare_blocks(
        dtype,
        head_dim,
        tiles_of_queries,
        tiles_of_queries * BIAS_GRADIENT_QUERIES,
    );
    let prepare = kernel("flash_backward_prepare")?;
    let mut launch = prepare.builder();
    launch.arg(&arguments);
    // SAFETY: the argument is the kernel's, over tensors of the sizes that it states.
    unsafe { launch.launch(config_1d(blocks, 256, 0)) }.w()?;

    let [batches, heads, queries, keys] = d_bias.dims;
    let blocks =
        batches * heads * queries.div_ceil(BIAS_GRADIENT_QUERIES) * keys.div_ceil(tiles.keys);
    let sums = kernel("flash_bias_gradient")?;
    sums.allow_shared_bytes(tiles.shared_bytes)?;
    let mut launch = sums.builder();
    launch.arg(&arguments).arg(&of_bias);
    // SAFETY: as above.
    unsafe {
        launch.launch(config_1d(
            blocks,
            tiles::BiasGradient::THREADS,
            tiles.shared_bytes,
        ))
    }
    .w()?;
    Ok(())
}

const _: () = assert!(size_of::<BiasGradientArguments>() == 32);
