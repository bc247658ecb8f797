//! The backward's launches: statistics of the rows, the products, and dq rounded.

use super::arguments::{BackwardArguments, BackwardMaps, CallSizes, Heads, Map, Strides};
use super::element;
use super::forward::{definitions, line};
use super::tiles::{self, compiled_head_dim};
use crate::kernels::cpu::flash_attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::source::{Kernel, Source, is_hopper};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, PushKernelArg};
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
    /// Contiguous, as is what rounding took from it.
    pub out: Heads<'a>,
    pub rounded_off: View<'a>,
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

/// The gradients of q, k and v.
pub(crate) fn backward(
    card: &CudaDevice,
    sizes: &Sizes,
    inputs: Inputs,
    gradients: Gradients,
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
    let kernel = |name: &str| {
        let name = format!("flash_backward_{name}{element}");
        source.kernel_with(card, &definitions, &name)
    };

    let tiles_of_queries = sizes.batch * sizes.heads * sizes.queries.div_ceil(queries);
    let rows = tiles_of_queries * queries;
    // SAFETY: `prepare` writes statistics and turns, and the first tile of keys its part of the sums.
    let (statistics, dq_sums, turns) = unsafe {
        (
            card.alloc::<f32>(2 * rows)?,
            card.alloc::<f32>(rows * head_dim)?,
            card.alloc::<u32>(tiles_of_queries + 1)?,
        )
    };
    let stream = card.cuda_stream();
    let heads_at_once = match hopper {
        Some(_) => ((1 << 17) / sizes.keys.max(1)).clamp(32, 64),
        None => sizes.batch * sizes.kv_heads,
    };
    let arguments = BackwardArguments {
        q: inputs.q.view.pointer,
        k: inputs.k.view.pointer,
        v: inputs.v.view.pointer,
        out: inputs.out.view.pointer,
        rounded_off: inputs.rounded_off.pointer,
        d_out: inputs.d_out.view.pointer,
        lse: inputs.lse.pointer,
        dq: gradients.dq.view.pointer,
        dk: gradients.dk.view.pointer,
        dv: gradients.dv.view.pointer,
        statistics: statistics.device_ptr(&stream).0,
        dq_sums: dq_sums.device_ptr(&stream).0,
        turns: turns.device_ptr(&stream).0,
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
    run(&kernel("prepare_")?, blocks, 256, 0)?;
    match hopper {
        Some(tiles) => {
            let maps = BackwardMaps([
                Map::new(&inputs.q, queries)?,
                Map::new(&inputs.k, tiles::BackwardHopper::KEYS)?,
                Map::new(&inputs.v, tiles::BackwardHopper::KEYS)?,
                Map::new(&inputs.d_out, queries)?,
            ]);
            let kernel_of_products = kernel("hopper_")?;
            let shared_bytes = tiles.shared_bytes(head_dim);
            kernel_of_products.allow_shared_bytes(shared_bytes)?;
            let blocks =
                sizes.keys.div_ceil(tiles::BackwardHopper::KEYS) * sizes.batch * sizes.kv_heads;
            let mut launch = kernel_of_products.builder();
            launch.arg(&maps).arg(&arguments);
            // SAFETY: as above.
            unsafe { launch.launch(line(blocks, 384, shared_bytes)) }.w()?;
            run(&kernel("hopper_finish_")?, tiles_of_queries, 256, 0)
        }
        None => {
            let tiles = &everywhere;
            let blocks = sizes.keys.div_ceil(tiles.keys) * sizes.batch * sizes.kv_heads;
            let threads = 32 * tiles.warps;
            run(&kernel("")?, blocks, threads, tiles.shared_bytes(head_dim))?;
            run(
                &kernel("finish_")?,
                tiles_of_queries,
                threads,
                queries * head_dim * 2,
            )
        }
    }
}
