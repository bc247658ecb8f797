//! [`super::gpu`] in a build without CUDA.

use crate::{Error, Result};
use candle_core::Device;

pub(super) enum PoolRecorder {}

pub(super) fn start(device: &Device) -> Result<PoolRecorder> {
    Err(Error::Device {
        name: crate::hardware::device_name(device),
        problem: "blocks of memory are recorded on the CPU and, in builds for CUDA, on NVIDIA's GPUs".into(),
        hint: "build with --features cuda for a GPU of NVIDIA's; memory::estimate predicts without running".into(),
    })
}

pub(super) fn allocations() -> u64 {
    0
}

pub(super) fn unknown_blocks() -> u64 {
    0
}

pub(super) fn register_block(_address: usize, _bytes: usize) {}
