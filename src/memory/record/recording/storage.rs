//! Where a tensor's elements are.

#[cfg(feature = "cuda")]
use super::gpu;
use candle_core::{CpuStorage, Storage, Tensor};

/// Address and size of the elements of a tensor's storage, if it is on the CPU or a GPU of NVIDIA's.
pub(in crate::memory) fn block_of(tensor: &Tensor) -> Option<(usize, usize)> {
    fn extent<T>(elements: &[T]) -> (usize, usize) {
        (elements.as_ptr().addr(), size_of_val(elements))
    }
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => match storage {
            CpuStorage::U8(x) => Some(extent(x)),
            CpuStorage::U32(x) => Some(extent(x)),
            CpuStorage::I64(x) => Some(extent(x)),
            CpuStorage::BF16(x) => Some(extent(x)),
            CpuStorage::F16(x) => Some(extent(x)),
            CpuStorage::F32(x) => Some(extent(x)),
            CpuStorage::F64(x) => Some(extent(x)),
            _ => None, // types that nothing here computes in
        },
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => gpu::block_of(storage),
        _ => None,
    }
}
