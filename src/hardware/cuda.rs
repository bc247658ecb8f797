//! Queries of a GPU and of its memory pool through the CUDA driver. candle's tensors are allocated from that pool.

use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks out changes of CUDA handles while a stream is captured. Hold it while a handle of a GPU is created or dropped,
/// and while a stream is captured: cudarc waits for the whole context when it creates a stream, and cuBLAS when its
/// handle is destroyed, which ends every capture in the process.
pub(crate) fn lock_captures() -> MutexGuard<'static, ()> {
    static CAPTURES: Mutex<()> = Mutex::new(());
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the GPU with a new stream.
pub(super) fn open(ordinal: usize) -> Result<Device> {
    let device = {
        let _lock = lock_captures();
        Device::new_cuda_with_stream(ordinal)?
    };
    let gpu = device.as_cuda_device()?;
    // By default the pool returns freed memory to the driver at every synchronisation, and then asks for it again. On a
    // GPU without a pool there is nothing to set.
    if let Ok(pool) = pool(gpu) {
        let mut keep_all = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a cuuint64_t.
        let _ =
            unsafe { result::mem_pool::set_attribute(pool, attribute, (&raw mut keep_all).cast()) };
    }
    // SAFETY: everything on this device runs on its one stream, including cuBLAS and cuRAND, so the order of calls is
    // the order of uses, and candle's two events per tensor are not needed. A copy to another GPU, or to another handle
    // of this one, runs on the other's stream; the docs of `device` require a synchronisation before it.
    unsafe { gpu.disable_event_tracking() };
    Ok(device)
}

/// Returns the GPU's model, memory and compute capability.
#[cfg(feature = "report")]
pub(super) fn description(device: &Device) -> Option<String> {
    let context = device
        .as_cuda_device()
        .ok()?
        .cuda_stream()
        .context()
        .clone();
    let (major, minor) = context.compute_capability().ok()?;
    let mib = context.total_mem().ok()? >> 20;
    let name = context.name().ok()?;
    Some(format!(
        "{name}, {mib} MiB, compute capability {major}.{minor}"
    ))
}

/// Returns whether the GPU's tensor cores support TF32: compute capability 8.0 and later.
pub(super) fn has_tf32(device: &Device) -> bool {
    let Ok(gpu) = device.as_cuda_device() else {
        return false;
    };
    let capability = gpu.cuda_stream().context().compute_capability();
    capability.is_ok_and(|(major, _)| major >= 8)
}

/// Returns the driver's free memory plus the pool's unused memory, in bytes.
pub(super) fn available_bytes(device: &Device) -> Option<u64> {
    let gpu = device.as_cuda_device().ok()?;
    device.synchronize().ok()?; // dropped tensors are freed in stream order
    let (free, _total) = gpu.cuda_stream().context().mem_get_info().ok()?;
    let reserved = counter(gpu, Counter::Reserved)?;
    Some(free as u64 + reserved.saturating_sub(counter(gpu, Counter::Used)?))
}

/// A counter of the memory pool.
#[derive(Clone, Copy)]
pub(crate) enum Counter {
    Used,
    UsedPeak,
    Reserved,
    ReservedPeak,
}

/// Returns a counter of the pool, in bytes.
pub(crate) fn pool_bytes(device: &Device, which: Counter) -> Option<u64> {
    counter(device.as_cuda_device().ok()?, which)
}

/// Resets both peaks to the current values.
pub(crate) fn reset_pool_peaks(device: &Device) -> Option<()> {
    let pool = pool(device.as_cuda_device().ok()?).ok()?;
    for which in [Counter::UsedPeak, Counter::ReservedPeak] {
        let mut zero = 0u64; // the only value that the driver accepts
        // SAFETY: the attribute is a cuuint64_t.
        unsafe { result::mem_pool::set_attribute(pool, which.attribute(), (&raw mut zero).cast()) }
            .ok()?;
    }
    Some(())
}

/// Returns the pool's unused memory to the driver, after waiting for the stream.
pub(crate) fn trim_pool(device: &Device) -> Result<()> {
    let pool = pool(device.as_cuda_device()?)?;
    device.synchronize()?;
    // SAFETY: the pool belongs to the device.
    unsafe { result::mem_pool::trim_to(pool, 0) }.w()
}

impl Counter {
    fn attribute(self) -> sys::CUmemPool_attribute {
        use sys::CUmemPool_attribute as Attribute;
        match self {
            Self::Used => Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            Self::UsedPeak => Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            Self::Reserved => Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            Self::ReservedPeak => Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        }
    }
}

fn counter(gpu: &CudaDevice, which: Counter) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: the attribute is a cuuint64_t.
    unsafe {
        result::mem_pool::get_attribute(pool(gpu).ok()?, which.attribute(), (&raw mut bytes).cast())
    }
    .ok()?;
    Some(bytes)
}

/// Returns the GPU's default pool, from which cuMemAllocAsync allocates.
fn pool(gpu: &CudaDevice) -> Result<sys::CUmemoryPool> {
    let stream = gpu.cuda_stream();
    let context = stream.context();
    context.bind_to_thread().w()?;
    // SAFETY: the device belongs to the context.
    unsafe { result::device::get_default_mem_pool(context.cu_device()) }.w()
}
