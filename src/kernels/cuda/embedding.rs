//! Rows of a table by id; see `embedding.cu`.

use super::source::{PRELUDE, Source, multiprocessors};
use super::{View, launch_config, packs, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "embedding",
    parts: &[PRELUDE, include_str!("embedding.cu")],
};

/// Positions that an id's bucket has room for.
const CAPACITY: usize = 32;
/// Positions of an id that a warp adds up by itself, as in the source.
const FEW: usize = 8;

/// y (count, width): the rows of table (vocab, width) that ids (count) u32 name.
pub(crate) fn forward(
    card: &CudaDevice,
    table: View,
    ids: View,
    width: usize,
    y: View,
) -> Result<()> {
    let kernel = SOURCE.kernel(card, &format!("embedding_forward_{}", suffix(table.dtype)))?;
    let of_row = 32 * packs(width, table).min(256).div_ceil(32);
    let of_block = (256 / of_row).max(1);
    let (count, width) = (ids.len as i64, width as i32);
    let mut launch = kernel.builder();
    launch
        .arg(&table.pointer)
        .arg(&ids.pointer)
        .arg(&y.pointer)
        .arg(&count)
        .arg(&width);
    let config = launch_config((ids.len.div_ceil(of_block), 1), (of_row, of_block));
    // SAFETY: the arguments are those of the kernel, and every id was checked against the table.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Adds the rows of dy (count, width) up into those of dtable (vocab, width), which holds zeros.
pub(crate) fn backward(
    card: &CudaDevice,
    dy: View,
    ids: View,
    width: usize,
    dtable: View,
) -> Result<()> {
    let (count, vocab) = (ids.len, dtable.len / width);
    let stream = card.cuda_stream();
    let found = card.alloc_zeros::<u32>(vocab + 2)?;
    // SAFETY: each kernel reads what one before it has written.
    let (buckets, many, ordered) = unsafe {
        (
            card.alloc::<u32>(vocab * CAPACITY)?,
            card.alloc::<u32>(count.div_ceil(FEW))?,
            card.alloc::<u32>(count)?,
        )
    };
    // Shadowed, they live to the end: what is freed is freed after the kernels, in the stream's order.
    let found = found.device_ptr(&stream).0;
    let buckets = buckets.device_ptr(&stream).0;
    let many = many.device_ptr(&stream).0;
    let ordered = ordered.device_ptr(&stream).0;
    let blocks = multiprocessors(card)?;
    let [positions, vocab, width, capacity] =
        [count, vocab, width, CAPACITY].map(|size| size as i32);
    let accumulate = 0i32;
    let name = suffix(dy.dtype);

    // SAFETY, of all four: the arguments are those of the kernels, and the buffers have the sizes that they say.
    let kernel = SOURCE.kernel(card, "embedding_buckets")?;
    let mut launch = kernel.builder();
    launch
        .arg(&ids.pointer)
        .arg(&positions)
        .arg(&found)
        .arg(&buckets)
        .arg(&capacity);
    unsafe { launch.launch(launch_config((count.div_ceil(256), 1), (256, 1))) }.w()?;

    let kernel = SOURCE.kernel(card, &format!("embedding_backward_few_{name}"))?;
    let mut launch = kernel.builder();
    launch
        .arg(&dy.pointer)
        .arg(&ids.pointer)
        .arg(&positions)
        .arg(&found)
        .arg(&vocab);
    launch
        .arg(&buckets)
        .arg(&capacity)
        .arg(&many)
        .arg(&dtable.pointer)
        .arg(&width)
        .arg(&accumulate);
    unsafe { launch.launch(launch_config((count.div_ceil(8), 1), (256, 1))) }.w()?;

    let kernel = SOURCE.kernel(card, "embedding_order")?;
    let mut launch = kernel.builder();
    launch
        .arg(&ids.pointer)
        .arg(&positions)
        .arg(&found)
        .arg(&vocab);
    launch.arg(&buckets).arg(&capacity).arg(&many).arg(&ordered);
    unsafe { launch.launch(launch_config((blocks, 1), (1024, 1))) }.w()?;

    let kernel = SOURCE.kernel(card, &format!("embedding_backward_many_{name}"))?;
    let mut launch = kernel.builder();
    launch
        .arg(&dy.pointer)
        .arg(&positions)
        .arg(&found)
        .arg(&vocab);
    launch.arg(&buckets).arg(&capacity).arg(&many).arg(&ordered);
    launch.arg(&dtable.pointer).arg(&width).arg(&accumulate);
    unsafe { launch.launch(launch_config((4 * blocks, 1), (32, 16))) }.w()?;
    Ok(())
}
