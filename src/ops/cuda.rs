//! Between candle's CUDA storage and the kernels' views.

use crate::kernels::cuda::View;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice as Slice};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};

/// The elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<View<'a>> {
    match layout.is_contiguous() {
        true => from_first(storage, layout),
        false => bail!("a kernel was handed a strided tensor: {layout:?}"),
    }
}

/// As [`view`], or heads by strides.
pub(super) fn lying<'a>(storage: &'a CudaStorage, layout: &'a Layout) -> Result<View<'a>> {
    match <&[usize; 4]>::try_from(layout.stride()) {
        Ok(strides @ [_, _, _, 1]) if !layout.is_contiguous() => {
            Ok(from_first(storage, layout)?.by_strides(strides))
        }
        _ => view(storage, layout),
    }
}

/// The elements of an operand, from its first on.
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

/// The elements of a contiguous tensor. (What a variable is set to is copied into the same buffer, so the view holds.)
pub(crate) fn elements(tensor: &Tensor) -> Result<View<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => Ok(view(storage, layout)?.owned_by(tensor)),
        other => bail!(
            "a CUDA kernel was handed a tensor on {:?}",
            other.device().location()
        ),
    }
}

/// The GPU that `tensor` is on.
pub(crate) fn gpu(tensor: &Tensor) -> Result<&CudaDevice> {
    tensor.device().as_cuda_device()
}

/// Room for `len` elements, for a kernel to write all of.
pub(crate) fn alloc_uninit(gpu: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    // SAFETY: the kernels write every element before anybody reads one.
    let slice = unsafe {
        match dtype {
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

/// What [`alloc_uninit`] has made, as kernels see it.
pub(crate) fn whole(storage: &CudaStorage) -> Result<View<'_>> {
    let len = match &storage.slice {
        Slice::U32(slice) => slice.len(),
        Slice::F16(slice) => slice.len(),
        Slice::BF16(slice) => slice.len(),
        Slice::F32(slice) => slice.len(),
        Slice::F64(slice) => slice.len(),
        _ => bail!("no CUDA kernel for {:?}", storage.dtype()),
    };
    view(storage, &Layout::contiguous(len))
}

/// A tensor of no graph.
pub(crate) fn tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
