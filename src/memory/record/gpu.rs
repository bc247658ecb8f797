//! A GPU's blocks, counted as the driver is asked for them: what the tracker is to the host's memory.

use super::buffer::{self, GPU_BYTES, Place, What};
use crate::Result;
use crate::hardware::cuda::{Counter, pool_bytes};
use crate::hardware::cupti::allocations::{self, Call, Subscription};
use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice as Slice};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The context whose blocks are counted; 0 while none's are.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static UNKNOWN_BLOCKS: AtomicU64 = AtomicU64::new(0);
/// By address: the driver is not told the size of what is given back.
static SIZES: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

fn sizes() -> MutexGuard<'static, HashMap<usize, usize>> {
    SIZES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lasts, a GPU's blocks are counted, and written to the recording that runs.
pub(super) struct Watch {
    _subscription: Subscription,
}

/// Counts the blocks of `device` from what its pool has given out by now.
pub(super) fn watch(device: &Device) -> Result<Watch> {
    let context = device.as_cuda_device()?.cuda_stream().context().cu_ctx();
    device.synchronize()?; // what was dropped is given back
    let current_bytes = pool_bytes(device, Counter::Used).unwrap_or_default();
    GPU_BYTES.store(current_bytes as usize, Relaxed);
    UNKNOWN_BLOCKS.store(0, Relaxed);
    sizes().clear();
    let watch = Watch {
        _subscription: allocations::subscribe(heard)?,
    };
    CONTEXT.store(context.addr(), Relaxed);
    Ok(watch)
}

impl Drop for Watch {
    fn drop(&mut self) {
        CONTEXT.store(0, Relaxed);
    }
}

fn heard(context: usize, call: Call) {
    if context != CONTEXT.load(Relaxed) {
        return;
    }
    match call {
        Call::Taken { address, bytes } => {
            sizes().insert(address, bytes);
            ALLOCATIONS.fetch_add(1, Relaxed);
            buffer::change(Place::Gpu, What::Taken, address, bytes, || {
                GPU_BYTES.fetch_add(bytes, Relaxed) + bytes
            });
        }
        Call::GivenBack { address } => {
            let Some(bytes) = sizes().remove(&address) else {
                UNKNOWN_BLOCKS.fetch_add(1, Relaxed);
                return;
            };
            buffer::change(Place::Gpu, What::GivenBack, address, bytes, || {
                GPU_BYTES.fetch_sub(bytes, Relaxed) - bytes
            });
        }
    }
}

pub(super) fn allocations() -> u64 {
    ALLOCATIONS.load(Relaxed)
}

/// How many blocks were given back that were taken before they were watched, and that [`register_block`] was not told
/// of.
pub(super) fn unknown_blocks() -> u64 {
    UNKNOWN_BLOCKS.load(Relaxed)
}

/// Says how large a block is that was taken before it was watched.
pub(super) fn register_block(address: usize, bytes: usize) {
    sizes().entry(address).or_insert(bytes);
}

pub(super) fn block_of(storage: &CudaStorage) -> Option<(usize, usize)> {
    fn extent<T>(storage: &CudaStorage, elements: &CudaSlice<T>) -> (usize, usize) {
        let stream = storage.device.cuda_stream();
        let address = elements.device_ptr(&stream).0 as usize;
        (address, elements.num_bytes())
    }
    match &storage.slice {
        Slice::U8(x) => Some(extent(storage, x)),
        Slice::U32(x) => Some(extent(storage, x)),
        Slice::I64(x) => Some(extent(storage, x)),
        Slice::BF16(x) => Some(extent(storage, x)),
        Slice::F16(x) => Some(extent(storage, x)),
        Slice::F32(x) => Some(extent(storage, x)),
        Slice::F64(x) => Some(extent(storage, x)),
        _ => None, // types that nothing here computes in
    }
}
