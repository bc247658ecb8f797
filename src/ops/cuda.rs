//! Between candle's CUDA storage and the kernels' views.

use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::{View, cublas};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice as Slice};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// The elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<View<'a>> {
    match layout.is_contiguous() {
        true => strided(storage, layout),
        false => bail!("a kernel was handed a strided tensor: {layout:?}"),
    }
}

/// The elements of an operand, from its first on, lying as they do.
pub(crate) fn strided<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<View<'a>> {
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

/// Checked ids, (count), on the GPU.
pub(super) fn ids(gpu: &CudaDevice, ids: &Tensor) -> Result<Tensor> {
    ids.to_device(&Device::Cuda(gpu.clone()))
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

/// The elements of a contiguous tensor as a matrix.
pub(super) fn matrix(tensor: &Tensor, rows: usize, cols: usize) -> Result<Matrix<'_>> {
    Ok(Matrix::new(elements(tensor)?, rows, cols))
}

/// `a b`, `count` times, one result after the other: sums in f32, rounded to `dtype` once.
pub(super) fn multiplied(
    gpu: &CudaDevice,
    [a, b]: [Matrix; 2],
    count: usize,
    dtype: DType,
) -> Result<CudaStorage> {
    let (rows, cols) = Matrix::product_of([&a, &b]);
    let storage = alloc_uninit(gpu, dtype, count * rows * cols)?;
    let c = Matrix::several(whole(&storage)?, rows, cols);
    cublas::multiply(gpu, [a, b], c, count, false)?;
    Ok(storage)
}

/// [`multiplied`], as a tensor of no graph.
pub(super) fn product(
    gpu: &CudaDevice,
    factors: [Matrix; 2],
    count: usize,
    dtype: DType,
    shape: impl Into<Shape>,
) -> Result<Tensor> {
    Ok(tensor(multiplied(gpu, factors, count, dtype)?, shape))
}
