//! Launches of the passes over all gradients before the update.

use super::super::{View, launch_config, set_to_zero};
use super::SOURCE;
use super::tables::Tables;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::ops::Range;

impl Tables {
    /// Multiplies the gradients of a range of entries, f32, by `inverse` (1) f64, in place. `flags` (all entries) u32:
    /// the flags of these entries become 1 if a product is not finite, else 0.
    pub(crate) fn unscale(
        &self,
        gpu: &CudaDevice,
        entries: Range<usize>,
        inverse: View,
        flags: View,
    ) -> Result<()> {
        set_to_zero(gpu, flags.slice(entries.start, entries.len()))?;
        let chunks = self.chunks(&entries);
        if chunks.is_empty() {
            return Ok(());
        }
        let kernel = SOURCE.kernel(gpu, "unscale", "")?;
        let (tensors, table) = (self.tensors_from(0), self.chunks_from(chunks.start));
        let mut launch = kernel.builder();
        launch.arg(&tensors).arg(&table);
        launch.arg(&inverse.pointer).arg(&flags.pointer);
        // SAFETY: the tables are laid out as the kernel reads them, over buffers of the sizes that they say.
        unsafe { launch.launch(launch_config((chunks.len(), 1), (256, 1))) }.w()?;
        Ok(())
    }

    /// Computes the sums of squares of the gradients of a range of entries, f32, bf16 or f16: `squares` (these entries)
    /// f64. `chunk_sums` f64 is scratch of [`chunks`](crate::kernels::workspace::chunks) for each of these entries.
    pub(crate) fn sums_of_squares(
        &self,
        gpu: &CudaDevice,
        entries: Range<usize>,
        chunk_sums: View,
        squares: View,
    ) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let first = self.chunks(&entries).start;
        for (part, gradients) in self.by_gradients(entries.clone()) {
            let chunks = self.chunks(&part);
            if chunks.is_empty() {
                continue;
            }
            let kernel = SOURCE.kernel(gpu, "chunk_squares", gradients)?;
            let (tensors, table) = (self.tensors_from(0), self.chunks_from(chunks.start));
            let sums = chunk_sums.slice(chunks.start - first, chunks.len());
            let mut launch = kernel.builder();
            launch.arg(&tensors).arg(&table);
            launch.arg(&sums.pointer);
            // SAFETY: the tables are laid out as the kernel reads them, over buffers of the sizes that they say.
            unsafe { launch.launch(launch_config((chunks.len(), 1), (256, 1))) }.w()?;
        }
        let kernel = SOURCE.kernel(gpu, "tensor_squares", "")?;
        let tensors = self.tensors_from(entries.start);
        let mut launch = kernel.builder();
        launch.arg(&tensors);
        launch.arg(&chunk_sums.pointer).arg(&squares.pointer);
        // SAFETY: as above.
        unsafe { launch.launch(launch_config((entries.len(), 1), (256, 1))) }.w()?;
        Ok(())
    }
}

/// Computes the clip factor from the sums of squares (P) f64 and max_norm (1) f64. `clip` (3) f64 receives the norm of
/// all gradients, then `min(1, max_norm / (norm + 1e-6))`. Its last word holds two i32: whether the norm is not finite,
/// so that the update is skipped, and the index of the first sum that is not finite, or -1.
pub(crate) fn clip_factor(
    gpu: &CudaDevice,
    squares: View,
    max_norm: View,
    clip: View,
) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, "clip_factor", "")?;
    let count = squares.len as i32;
    let mut launch = kernel.builder();
    launch.arg(&squares.pointer).arg(&count);
    launch.arg(&max_norm.pointer).arg(&clip.pointer);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((1, 1), (256, 1))) }.w()?;
    Ok(())
}

/// Computes `first` (1) u32, the index of the first of flags (P) u32 that is set, or P. `clip` (3) f64 as in
/// [`clip_factor`]: norm 0, factor 1, and the update is skipped if a flag is set.
pub(crate) fn check_overflow(gpu: &CudaDevice, flags: View, first: View, clip: View) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, "check_overflow", "")?;
    let count = flags.len as i32;
    let mut launch = kernel.builder();
    launch.arg(&flags.pointer).arg(&count);
    launch.arg(&first.pointer).arg(&clip.pointer);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((1, 1), (256, 1))) }.w()?;
    Ok(())
}
