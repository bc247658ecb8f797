//! Launches of the update.

use super::super::{View, launch_config};
use super::SOURCE;
use super::tables::{Entry, Tables};
use crate::kernels::Update;
use crate::kernels::cpu::update::COEFFICIENTS;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use std::ops::Range;

/// Compiles and loads the kernel.
pub(crate) fn prepare(gpu: &CudaDevice) -> Result<()> {
    SOURCE.kernel(gpu, "adamw", "f32").map(drop)
}

impl Tables {
    /// Updates a range of entries in place. `updates` ([`WORDS`] per update) f32 are [`words`]. `clip` (3) f64, if
    /// there is one, was written by [`clip_factor`](super::clip_factor) or [`check_overflow`](super::check_overflow).
    pub(crate) fn update(
        &self,
        gpu: &CudaDevice,
        entries: Range<usize>,
        updates: View,
        clip: Option<View>,
    ) -> Result<()> {
        let clip = clip.map_or(0, |clip| clip.pointer);
        for (part, [rule, types]) in self.by_kernel(entries) {
            let chunks = self.chunks(&part);
            if chunks.is_empty() {
                continue;
            }
            let kernel = SOURCE.kernel(gpu, rule, types)?;
            let (tensors, table) = (self.tensors_from(0), self.chunks_from(chunks.start));
            let mut launch = kernel.builder();
            launch.arg(&tensors).arg(&table);
            launch.arg(&updates.pointer).arg(&clip);
            // SAFETY: the tables are laid out as the kernel reads them, over buffers of the sizes that they say.
            unsafe { launch.launch(launch_config((chunks.len(), 1), (256, 1))) }.w()?;
        }
        Ok(())
    }
}

/// Updates all entries in place, by tables that are built for this step only. `has_master_weights` selects
/// [`Tables::with_master_weights`].
pub(crate) fn step(
    gpu: &CudaDevice,
    entries: &[Entry],
    updates: &[Update],
    has_master_weights: bool,
) -> Result<()> {
    let tables = match has_master_weights {
        true => Tables::with_master_weights(gpu, entries)?,
        false => Tables::new(gpu, entries)?,
    };
    let updates: Vec<f32> = updates.iter().flat_map(words).collect();
    let updates = gpu.clone_htod(&updates)?;
    let pointer = updates.device_ptr(&gpu.cuda_stream()).0;
    let updates_view = View::new(pointer, DType::F32, updates.len()).owned_by(&updates);
    tables.update(gpu, 0..tables.len(), updates_view, None)
}

/// The number of words of an update.
pub(crate) const WORDS: usize = COEFFICIENTS + 2;

/// Returns an update as the kernel reads it.
pub(crate) fn words(update: &Update) -> [f32; WORDS] {
    let mut words = [0.0; WORDS];
    let coefficients = update.rule.words().map(|x| x as f32);
    words[..COEFFICIENTS].copy_from_slice(&coefficients);
    words[COEFFICIENTS..]
        .copy_from_slice(&[f32::from_bits(update.rounding), update.clip_value as f32]);
    words
}
