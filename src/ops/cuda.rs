//! Conversion between candle's CUDA storage and the views of kernels.

use crate::kernels::cuda::View;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice as Slice};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};

/// Returns the elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<View<'a>> {
    match layout.is_contiguous() {
        true => from_first(storage, layout),
        false => bail!("kernel expected a contiguous tensor, got {layout:?}"),
    }
}

/// Returns a [`view`] of an operand that is contiguous or heads with strides.
pub(super) fn strided<'a>(storage: &'a CudaStorage, layout: &'a Layout) -> Result<View<'a>> {
    match <&[usize; 4]>::try_from(layout.stride()) {
        Ok(strides @ [_, _, _, 1]) if !layout.is_contiguous() => {
            Ok(from_first(storage, layout)?.by_strides(strides))
        }
        _ => view(storage, layout),
    }
}

/// Returns the elements of an operand from its first on.
fn from_first<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<View<'a>> {
    let stream = storage.device.cuda_stream();
    let base = match &storage.slice {
        Slice::U8(slice) => slice.device_ptr(&stream).0,
        Slice::I64(slice) => slice.device_ptr(&stream).0,
        Slice::U32(slice) => slice.device_ptr(&stream).0,
        Slice::F16(slice) => slice.device_ptr(&stream).0,
        Slice::BF16(slice) => slice.device_ptr(&stream).0,
        Slice::F32(slice) => slice.device_ptr(&stream).0,
        Slice::F64(slice) => slice.device_ptr(&stream).0,
        _ => bail!("no CUDA kernel for {:?}", storage.dtype()),
    };
    let dtype = storage.dtype();
    let offset_bytes = (layout.start_offset() * dtype.size_in_bytes()) as u64;
    let len = layout.shape().elem_count();
    Ok(View::new(base + offset_bytes, dtype, len))
}

/// Returns the elements of a contiguous tensor. The view of a variable stays valid when it is set, because the new
/// value is copied into the same buffer.
pub(crate) fn elements(tensor: &Tensor) -> Result<View<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => Ok(view(storage, layout)?.owned_by(tensor)),
        other => bail!(
            "kernel expected a tensor on a CUDA device, got one on {:?}",
            other.device().location()
        ),
    }
}

pub(crate) fn gpu(tensor: &Tensor) -> Result<&CudaDevice> {
    tensor.device().as_cuda_device()
}

/// Allocates `len` elements, all of which a kernel must write.
pub(crate) fn alloc_uninit(gpu: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    // SAFETY: the kernels write every element before it is read.
    let slice = unsafe {
        match dtype {
            DType::U8 => Slice::U8(gpu.alloc(len)?),
            DType::U32 => Slice::U32(gpu.alloc(len)?),
            DType::F16 => Slice::F16(gpu.alloc(len)?),
            DType::BF16 => Slice::BF16(gpu.alloc(len)?),
            DType::F32 => Slice::F32(gpu.alloc(len)?),
            DType::F64 => Slice::F64(gpu.alloc(len)?),
            other => bail!("no CUDA kernel for {other:?}"),
        }
    };
    let device = gpu.clone();
    Ok(CudaStorage { slice, device })
}

/// Returns a view of all that [`alloc_uninit`] allocated.
pub(crate) fn whole(storage: &CudaStorage) -> Result<View<'_>> {
    let len = match &storage.slice {
        Slice::U8(slice) => slice.len(),
        Slice::U32(slice) => slice.len(),
        Slice::F16(slice) => slice.len(),
        Slice::BF16(slice) => slice.len(),
        Slice::F32(slice) => slice.len(),
        Slice::F64(slice) => slice.len(),
        _ => bail!("no CUDA kernel for {:?}", storage.dtype()),
    };
    view(storage, &Layout::contiguous(len))
}

/// Returns a tensor without a graph.
pub(crate) fn tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
