//! Values other than arguments that change in every run, such as learning rates and the loss scale. They are in
//! one buffer that is copied to the GPU before a run.

use super::super::executor::Controls;
use super::super::plan::Plan;
use super::device_pointers::start_of;
use crate::Result;
use crate::kernels::Update;
use crate::kernels::cuda::View;
use crate::kernels::cuda::update;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;

/// The offset of the updates, in bytes. Before them are the maximum norm (f64), the inverse loss scale (f64) and the
/// loss's gradient (f32).
const UPDATES: usize = 64;
const UPDATE_BYTES: usize = 4 * update::WORDS;

pub(super) struct RunValues {
    host: Vec<u8>,
    device: CudaSlice<u8>,
}

impl RunValues {
    pub(super) fn new(plan: &Plan, gpu: &CudaDevice) -> Result<Self> {
        let updates = plan.parameters(); // at most one per parameter
        let bytes = UPDATES + updates * UPDATE_BYTES;
        Ok(Self {
            host: vec![0; bytes],
            device: gpu.alloc_zeros(bytes)?,
        })
    }

    /// Writes the values of a run and copies them to the GPU. Does nothing for a plan that reads no parameters.
    pub(super) fn fill(
        &mut self,
        gpu: &CudaDevice,
        plan: &Plan,
        controls: &Controls<'_>,
    ) -> Result<()> {
        if plan.parameters() == 0 {
            return Ok(());
        }
        let loss_scale = controls.loss_scale.unwrap_or(1.0);
        self.put(0, &controls.clip_norm.to_le_bytes());
        self.put(8, &(1.0 / loss_scale).to_le_bytes());
        self.put(16, &(controls.loss_gradient() as f32).to_le_bytes());
        let mut end = UPDATES;
        for of_group in distinct(controls.updates) {
            let words = update::words(of_group).map(f32::to_bits);
            self.put_words(end, &words);
            end += UPDATE_BYTES;
        }
        let used = &mut self.device.slice_mut(..end);
        Ok(gpu.memcpy_htod(&self.host[..end], used)?)
    }

    fn put_words(&mut self, at: usize, words: &[u32]) {
        let device_pointers = self.host[at..at + 4 * words.len()].chunks_exact_mut(4);
        for (place, word) in device_pointers.zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.host[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn view(&self, at: usize, dtype: DType, len: usize) -> View<'_> {
        View::new(start_of(&self.device) + at as u64, dtype, len)
    }

    pub(super) fn clip_norm(&self) -> View<'_> {
        self.view(0, DType::F64, 1)
    }

    pub(super) fn inverse_scale(&self) -> View<'_> {
        self.view(8, DType::F64, 1)
    }

    pub(super) fn loss_gradient(&self) -> View<'_> {
        self.view(16, DType::F32, 1)
    }

    pub(super) fn updates(&self) -> View<'_> {
        let len = (self.host.len() - UPDATES) / 4;
        self.view(UPDATES, DType::F32, len)
    }
}

/// Returns the distinct updates in the order of their first occurrence. There is one for each group of parameters.
fn distinct(updates: &[Update]) -> Vec<&Update> {
    let mut found: Vec<&Update> = Vec::new();
    for update in updates {
        if !found.contains(&update) {
            found.push(update);
        }
    }
    found
}

/// Returns the index of each parameter's update among the distinct ones.
pub(super) fn groups(updates: &[Update]) -> Vec<usize> {
    let found = distinct(updates);
    let place = |update| found.iter().position(|other| *other == update);
    updates.iter().filter_map(place).collect()
}
