//! Counts and records a GPU's blocks, from the driver's calls: what the tracker does for the host's memory.

use super::buffer::{self, EventKind, GPU_BYTES, Place};
use crate::Result;
use crate::hardware::cuda::{Counter, pool_bytes};
use crate::hardware::cupti::allocations::{self, Call, Subscription};
use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice as Slice};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The CUDA context whose blocks are counted; 0 means none.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static UNKNOWN_BLOCKS: AtomicU64 = AtomicU64::new(0);
/// Sizes by address: the driver's free has no size.
static SIZES: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

fn sizes() -> MutexGuard<'static, HashMap<usize, usize>> {
    SIZES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Guard: while it is alive, a GPU's blocks are counted and written to the running recording.
pub(super) struct PoolRecorder {
    _subscription: Subscription,
}

/// Starts to count the blocks of `device`. The count begins with what its pool has allocated.
pub(super) fn start(device: &Device) -> Result<PoolRecorder> {
    let context = device.as_cuda_device()?.cuda_stream().context().cu_ctx();
    device.synchronize()?; // finish pending frees
    let current_bytes = pool_bytes(device, Counter::Used).unwrap_or_default();
    GPU_BYTES.store(current_bytes as usize, Relaxed);
    UNKNOWN_BLOCKS.store(0, Relaxed);
    sizes().clear();
    let recorder = PoolRecorder {
        _subscription: allocations::subscribe(handle)?,
    };
    CONTEXT.store(context.addr(), Relaxed);
    Ok(recorder)
}

impl Drop for PoolRecorder {
    fn drop(&mut self) {
        CONTEXT.store(0, Relaxed);
    }
}

fn handle(context: usize, call: Call) {
    if context != CONTEXT.load(Relaxed) {
        return;
    }
    match call {
        Call::Allocated { address, bytes } => {
            sizes().insert(address, bytes);
            ALLOCATIONS.fetch_add(1, Relaxed);
            buffer::change(Place::Gpu, EventKind::Allocated, address, bytes, || {
                GPU_BYTES.fetch_add(bytes, Relaxed) + bytes
            });
        }
        Call::Freed { address } => {
            let Some(bytes) = sizes().remove(&address) else {
                UNKNOWN_BLOCKS.fetch_add(1, Relaxed);
                return;
            };
            buffer::change(Place::Gpu, EventKind::Freed, address, bytes, || {
                GPU_BYTES.fetch_sub(bytes, Relaxed) - bytes
            });
        }
    }
}

pub(super) fn allocations() -> u64 {
    ALLOCATIONS.load(Relaxed)
}

/// Returns the number of freed blocks of unknown size: allocated before the recording, and not passed to
/// [`register_block`].
pub(super) fn unknown_blocks() -> u64 {
    UNKNOWN_BLOCKS.load(Relaxed)
}

/// Registers the size of a block that was allocated before the recording.
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
        _ => None, // types that this crate does not compute in
    }
}
