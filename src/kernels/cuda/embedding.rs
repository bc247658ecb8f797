//! The embedding and its gradient; see `embedding.cu`.

use super::source::{PRELUDE, Source, multiprocessors};
use super::{View, launch_config, packs, set_to_zero, suffix, suffixes};
use crate::kernels::workspace::{EMBEDDING_CAPACITY, embedding_backward};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "embedding",
    parts: &[PRELUDE, include_str!("embedding.cu")],
};

/// Copies to y (count, width) the rows of table (vocab, width) that ids (count) u32 select.
pub(crate) fn forward(
    gpu: &CudaDevice,
    table: View,
    ids: View,
    width: usize,
    y: View,
) -> Result<()> {
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "embedding_forward", suffix(table.dtype))?;
    let of_row = 32 * packs(width, table).min(256).div_ceil(32);
    let of_block = (256 / of_row).max(1);
    let (count, width) = (ids.len as i64, width as i32);
    let mut launch = kernel.builder();
    launch.arg(&table.pointer).arg(&ids.pointer).arg(&y.pointer);
    launch.arg(&count).arg(&width);
    let config = launch_config((ids.len.div_ceil(of_block), 1), (of_row, of_block));
    // SAFETY: the arguments are those of the kernel, and every id was checked against the table.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Sums the rows of dy (count, width) by id into dtable (vocab, width), whose dtype is dy's or f32. Sums are added to
/// dtable if `accumulate`; otherwise dtable is overwritten. ids (count) u32; the row of `padding_id` gets nothing.
/// `workspace` u32 is scratch, of the sum of [`embedding_backward`]'s lengths.
pub(crate) fn backward(
    gpu: &CudaDevice,
    dy: View,
    ids: View,
    padding_id: Option<u32>,
    dtable: View,
    accumulate: bool,
    workspace: View,
) -> Result<()> {
    if dy.len == 0 {
        return match accumulate {
            true => Ok(()),
            false => set_to_zero(gpu, dtable),
        };
    }
    let (count, width) = (ids.len, dy.len / ids.len);
    let vocab = dtable.len / width;
    let mut end = 0;
    let [found, buckets, many, ordered] = embedding_backward(count, vocab).map(|len| {
        end += len;
        workspace.slice(end - len, len)
    });
    set_to_zero(gpu, found)?;
    if !accumulate {
        set_to_zero(gpu, dtable)?; // rows whose ids do not occur are not written
    }
    let blocks = multiprocessors(gpu)?;
    let [positions, vocab, width, capacity] =
        [count, vocab, width, EMBEDDING_CAPACITY].map(|size| size as i32);
    let accumulate = i32::from(accumulate);
    let padding_id = padding_id.unwrap_or(u32::MAX); // no id is that large: vocabularies have under 2^32 rows
    let types = suffixes(dy.dtype, dtable.dtype);

    // SAFETY, of all four: the arguments are those of the kernels, and the buffers have the sizes that they say.
    let kernel = SOURCE.kernel(gpu, "embedding_buckets", "")?;
    let mut launch = kernel.builder();
    launch.arg(&ids.pointer).arg(&positions);
    launch.arg(&found.pointer);
    launch.arg(&buckets.pointer).arg(&capacity);
    unsafe { launch.launch(launch_config((count.div_ceil(256), 1), (256, 1))) }.w()?;

    let kernel = SOURCE.kernel(gpu, "embedding_backward_few", types)?;
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&ids.pointer).arg(&positions);
    launch.arg(&padding_id);
    launch.arg(&found.pointer).arg(&vocab);
    launch.arg(&buckets.pointer).arg(&capacity);
    launch.arg(&many.pointer);
    launch.arg(&dtable.pointer).arg(&width).arg(&accumulate);
    unsafe { launch.launch(launch_config((count.div_ceil(8), 1), (256, 1))) }.w()?;

    let kernel = SOURCE.kernel(gpu, "embedding_order", "")?;
    let mut launch = kernel.builder();
    launch.arg(&ids.pointer).arg(&positions);
    launch.arg(&found.pointer).arg(&vocab);
    launch.arg(&buckets.pointer).arg(&capacity);
    launch.arg(&many.pointer).arg(&ordered.pointer);
    unsafe { launch.launch(launch_config((blocks, 1), (1024, 1))) }.w()?;

    let kernel = SOURCE.kernel(gpu, "embedding_backward_many", types)?;
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&positions);
    launch.arg(&found.pointer).arg(&vocab);
    launch.arg(&buckets.pointer).arg(&capacity);
    launch.arg(&many.pointer).arg(&ordered.pointer);
    launch.arg(&dtable.pointer).arg(&width).arg(&accumulate);
    unsafe { launch.launch(launch_config((4 * blocks, 1), (32, 16))) }.w()?;
    Ok(())
}
