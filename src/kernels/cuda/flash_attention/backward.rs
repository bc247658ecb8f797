//! The backward's launches: statistics of the rows, the products, and dq rounded.

use super::arguments::{BackwardArguments, BackwardMaps, CallSizes, Heads, Map, Strides};
use super::element;
use super::forward::{definitions, line};
use super::tiles::{self, compiled_head_dim};
use super::workspace::Workspace;
use crate::kernels::cpu::flash_attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::kernel::Kernel;
use crate::kernels::cuda::source::{Source, is_hopper};
use crate::kernels::workspace;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "flash_backward",
    parts: &[
        include_str!("common.cuh"),
        include_str!("backward.cuh"),
        include_str!("backward.cu"),
    ],
};
const HOPPER: Source = Source {
    name: "flash_backward_hopper",
    parts: &[
        include_str!("common.cuh"),
        include_str!("hopper.cuh"),
        include_str!("backward.cuh"),
        include_str!("backward_hopper.cu"),
    ],
};

/// What is read.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub q: Heads<'a>,
    pub k: Heads<'a>,
    pub v: Heads<'a>,
    pub out: Heads<'a>,
    /// What rounding took from out, where that was kept: (B, H, Tq, Dh) contiguous.
    pub rounded_off: Option<View<'a>>,
    pub d_out: Heads<'a>,
    /// (B, H, Tq) f32.
    pub lse: View<'a>,
}

/// What is written.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    pub dq: Heads<'a>,
    pub dk: Heads<'a>,
    pub dv: Heads<'a>,
}

/// What a block shares, for such a call.
pub(super) fn shared_bytes(card: &CudaDevice, sizes: &Sizes) -> usize {
    let head_dim = compiled_head_dim(sizes.head_dim);
    match tiles::BackwardHopper::new(head_dim).filter(|_| is_hopper(card)) {
        Some(tiles) => tiles.shared_bytes(head_dim),
        None => tiles::Backward::new(head_dim).shared_bytes(head_dim),
    }
}

/// Words of the statistics and the sums of dq of so many tiles of queries, and of the turns.
fn parts(tiles_of_queries: usize, queries: usize, head_dim: usize) -> [usize; 3] {
    let rows = tiles_of_queries * queries;
    [2 * rows, rows * head_dim, tiles_of_queries + 1]
}

/// How many tiles of queries there are, each of one head.
fn tiles_of_queries(sizes: &Sizes, queries: usize) -> usize {
    sizes.batch * sizes.heads * sizes.queries.div_ceil(queries)
}

/// How many u32 the backward works in, on any card: the larger of what the two sets of kernels want.
pub(crate) fn backward_workspace_len(sizes: &Sizes) -> usize {
    workspace::flash_backward(sizes).iter().sum()
}

/// The gradients of q, k and v. `workspace` ([`backward_workspace_len`]) u32 is room to work in.
pub(crate) fn backward(
    card: &CudaDevice,
    sizes: &Sizes,
    inputs: Inputs,
    gradients: Gradients,
    workspace: View,
) -> Result<()> {
    let head_dim = compiled_head_dim(sizes.head_dim);
    let element = element(inputs.q.view.dtype);
    let hopper = tiles::BackwardHopper::new(head_dim).filter(|_| is_hopper(card));
    let everywhere = tiles::Backward::new(head_dim);
    let (source, definitions, queries) = match &hopper {
        Some(tiles) => {
            let definitions = definitions(head_dim, element, tiles.definitions());
            (&HOPPER, definitions, tiles.queries)
        }
        None => {
            let definitions = definitions(head_dim, element, everywhere.definitions());
            (&SOURCE, definitions, everywhere.queries)
        }
    };
    let kernel = |stem| source.kernel_with(card, &definitions, stem, element);

    let tiles_of_queries = tiles_of_queries(sizes, queries);
    let rows = tiles_of_queries * queries;
    // `prepare` writes statistics and turns, and the first tile of keys its part of the sums.
    let mut room = Workspace::new(workspace);
    let [statistics, dq_sums, turns] =
        parts(tiles_of_queries, queries, head_dim).map(|len| room.take(len).pointer);
    let heads_at_once = match hopper {
        Some(_) => ((1 << 17) / sizes.keys.max(1)).clamp(32, 64),
        None => sizes.batch * sizes.kv_heads,
    };
    let arguments = BackwardArguments {
        q: inputs.q.view.pointer,
        k: inputs.k.view.pointer,
        v: inputs.v.view.pointer,
        out: inputs.out.view.pointer,
        rounded_off: inputs.rounded_off.map_or(0, |rest| rest.pointer),
        d_out: inputs.d_out.view.pointer,
        lse: inputs.lse.pointer,
        dq: gradients.dq.view.pointer,
        dk: gradients.dk.view.pointer,
        dv: gradients.dv.view.pointer,
        statistics,
        dq_sums,
        turns,
        q_strides: Strides::from(&inputs.q),
        k_strides: Strides::from(&inputs.k),
        v_strides: Strides::from(&inputs.v),
        out_strides: Strides::from(&inputs.out),
        d_out_strides: Strides::from(&inputs.d_out),
        dq_strides: Strides::from(&gradients.dq),
        dk_strides: Strides::from(&gradients.dk),
        dv_strides: Strides::from(&gradients.dv),
        sizes: CallSizes::new(sizes, heads_at_once),
    };
    let run = |kernel: &Kernel, blocks, threads, shared_bytes| -> Result<()> {
        kernel.allow_shared_bytes(shared_bytes)?;
        let mut launch = kernel.builder();
        launch.arg(&arguments);
        // SAFETY: the argument is the kernel's, over tensors of the sizes that it says.
        unsafe { launch.launch(line(blocks, threads, shared_bytes)) }.w()?;
        Ok(())
    };

    let chunks = head_dim / 8;
    let lanes_a_row = chunks.next_power_of_two();
    let blocks = rows
        .div_ceil(256 / lanes_a_row)
        .max((tiles_of_queries + 1).div_ceil(256));
    run(&kernel("flash_backward_prepare")?, blocks, 256, 0)?;
    match hopper {
        Some(tiles) => {
            let maps = BackwardMaps([
                Map::new(&inputs.q, queries)?,
                Map::new(&inputs.k, tiles::BackwardHopper::KEYS)?,
                Map::new(&inputs.v, tiles::BackwardHopper::KEYS)?,
                Map::new(&inputs.d_out, queries)?,
            ]);
            let kernel_of_products = kernel("flash_backward_hopper")?;
            let shared_bytes = tiles.shared_bytes(head_dim);
            kernel_of_products.allow_shared_bytes(shared_bytes)?;
            let blocks =
                sizes.keys.div_ceil(tiles::BackwardHopper::KEYS) * sizes.batch * sizes.kv_heads;
            let mut launch = kernel_of_products.builder();
            launch.arg(&maps).arg(&arguments);
            // SAFETY: as above.
            unsafe { launch.launch(line(blocks, 384, shared_bytes)) }.w()?;
            run(
                &kernel("flash_backward_hopper_finish")?,
                tiles_of_queries,
                256,
                0,
            )
        }
        None => {
            let tiles = &everywhere;
            let blocks = sizes.keys.div_ceil(tiles.keys) * sizes.batch * sizes.kv_heads;
            let threads = 32 * tiles.warps;
            run(
                &kernel("flash_backward")?,
                blocks,
                threads,
                tiles.shared_bytes(head_dim),
            )?;
            run(
                &kernel("flash_backward_finish")?,
                tiles_of_queries,
                threads,
                queries * head_dim * 2,
            )
        }
    }
}
