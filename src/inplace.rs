//! Access to the elements of CPU tensors as mutable slices, and in-place functions on them.

use crate::kernels::cpu::{Stored, reduce};
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, WithDType, bail,
};
use std::cell::Cell;

/// Runs `$body` with the type `$T` of a dtype, which must be one of the kernels' dtypes.
macro_rules! for_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => candle_core::bail!("no CPU kernel for {other:?}"),
        }
    };
}
pub(crate) use for_real;

/// Runs `$body` like [`for_real`], also for half precision, with kernels that widen on reading.
macro_rules! for_stored {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => $crate::inplace::for_real!(other, $T => $body),
        }
    };
}
pub(crate) use for_stored;

/// Runs `$body` like [`for_stored`], also for u8, u32 and i64.
macro_rules! for_any {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::U8 => {
                type $T = u8;
                $body
            }
            candle_core::DType::U32 => {
                type $T = u32;
                $body
            }
            candle_core::DType::I64 => {
                type $T = i64;
                $body
            }
            other => $crate::inplace::for_stored!(other, $T => $body),
        }
    };
}
pub(crate) use for_any;

/// Evaluates `$body` with the elements of a CPU storage of any of the kernels' dtypes as `$x`.
macro_rules! for_elements {
    ($storage:expr, $x:ident => $body:expr) => {
        match $storage {
            candle_core::CpuStorage::U8($x) => $body,
            candle_core::CpuStorage::U32($x) => $body,
            candle_core::CpuStorage::I64($x) => $body,
            candle_core::CpuStorage::F16($x) => $body,
            candle_core::CpuStorage::BF16($x) => $body,
            candle_core::CpuStorage::F32($x) => $body,
            candle_core::CpuStorage::F64($x) => $body,
            _ => candle_core::bail!("expected f16, bf16, f32, f64, u8, u32 or i64"),
        }
    };
}
pub(crate) use for_elements;

/// An in-place op that passes a tensor's bytes, and their dtype, to a function.
struct WithMutBytes<F>(Cell<Option<F>>);

impl<F: FnOnce(DType, *mut [u8])> InplaceOp1 for WithMutBytes<F> {
    fn name(&self) -> &'static str {
        "with_mut_bytes"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor");
        };
        fn bytes_of<T: WithDType>(x: &mut [T]) -> (DType, *mut [u8]) {
            let bytes = std::ptr::slice_from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(x));
            (T::DTYPE, bytes)
        }
        let (dtype, bytes) = for_elements!(storage, x => bytes_of(&mut x[start..end]));
        if let Some(f) = self.0.take() {
            f(dtype, bytes);
        }
        Ok(())
    }
}

/// Calls `f` with the dtype and the bytes of a contiguous CPU tensor of any dtype but the smallest floats, for writing.
///
/// Calls nest, which gives several tensors at once. Inside, touching any tensor on a borrowed storage deadlocks.
pub(crate) fn with_mut_bytes<R>(
    tensor: &Tensor,
    f: impl FnOnce(DType, *mut [u8]) -> R,
) -> Result<R> {
    let mut result = None;
    let run = |dtype: DType, bytes: *mut [u8]| result = Some(f(dtype, bytes));
    tensor.inplace_op1(&WithMutBytes(Cell::new(Some(run))))?;
    match result {
        Some(result) => Ok(result),
        None => bail!("expected a tensor on the CPU"),
    }
}

/// Calls `f` with the bytes of all `tensors`, in order, for writing. Each must be alone on its storage.
pub(crate) fn with_all_mut_bytes<R>(
    tensors: &[&Tensor],
    f: impl FnOnce(&[*mut [u8]]) -> R,
) -> Result<R> {
    // Behind a pointer: otherwise each level of recursion would be another type.
    type Borrower<'f, R> = Box<dyn FnOnce(&[*mut [u8]]) -> R + 'f>;

    fn borrow_rest<R>(
        tensors: &[&Tensor],
        borrowed: &mut Vec<*mut [u8]>,
        f: Borrower<'_, R>,
    ) -> Result<R> {
        match tensors {
            [] => Ok(f(borrowed)),
            [first, rest @ ..] => with_mut_bytes(first, |_, bytes| {
                borrowed.push(bytes);
                borrow_rest(rest, borrowed, f)
            })?,
        }
    }
    borrow_rest(tensors, &mut Vec::with_capacity(tensors.len()), Box::new(f))
}

/// Calls `f` with the elements of a contiguous CPU tensor of `T`, for writing. Calls nest as those of
/// [`with_mut_bytes`] do.
pub(crate) fn with_mut_slice<T: Stored, R>(
    tensor: &Tensor,
    f: impl FnOnce(&mut [T]) -> Result<R>,
) -> Result<R> {
    with_mut_bytes(tensor, |dtype, bytes| {
        if dtype != T::DTYPE {
            bail!("expected a tensor of {}", T::DTYPE.as_str());
        }
        // SAFETY: the bytes of elements of `T`, borrowed exclusively.
        f(unsafe { std::slice::from_raw_parts_mut(bytes.cast(), bytes.len() / size_of::<T>()) })
    })?
}

/// Calls `f` with the elements of a contiguous CPU tensor of `T`, for reading.
pub(crate) fn read<T: WithDType, R>(
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => f(&storage.as_slice::<T>()?[start..end]),
        _ => bail!("expected a contiguous tensor on the CPU"),
    }
}

/// Identifies a storage: tensors with one address share their elements.
pub(crate) fn storage_address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref(&*storage).addr()
}

/// Returns whether the kernels support this dtype.
pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// Returns the dtype in which numbers stored as `dtype` are summed.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Returns the value of a scalar tensor. It is converted on the host, since not every device has f64.
pub(crate) fn to_f64(scalar: &Tensor) -> Result<f64> {
    let scalar = scalar.detach().to_device(&Device::Cpu)?;
    scalar.to_dtype(DType::F64)?.to_scalar()
}

/// Returns the sum of squares of all elements.
pub(crate) fn sum_of_squares(tensor: &Tensor) -> Result<f64> {
    if !tensor.device().is_cpu() {
        return to_f64(&tensor.to_dtype(wide(tensor.dtype()))?.sqr()?.sum_all()?);
    }
    let x = tensor.contiguous()?;
    for_stored!(x.dtype(), T => read(&x, |x: &[T]| Ok(reduce::sum_of_squares(x))))
}

/// Returns whether all elements are finite.
pub(crate) fn all_finite(tensor: &Tensor) -> Result<bool> {
    if !tensor.device().is_cpu() {
        // 0 times infinity is NaN, and a sum keeps a NaN.
        let zeros = (tensor.to_dtype(wide(tensor.dtype()))? * 0.0)?;
        return Ok(to_f64(&zeros.sum_all()?)? == 0.0);
    }
    let x = tensor.contiguous()?;
    for_stored!(x.dtype(), T => read(&x, |x: &[T]| Ok(reduce::all_finite(x))))
}

/// Computes `tensor *= factor` on a contiguous CPU tensor.
pub(crate) fn scale(tensor: &Tensor, factor: f64) -> Result<()> {
    for_stored!(tensor.dtype(), T => with_mut_slice(tensor, |x: &mut [T]| {
        reduce::scale(x, factor);
        Ok(())
    }))
}

/// Computes `tensor = min(max(tensor, -bound), bound)` on a contiguous CPU tensor.
pub(crate) fn clamp(tensor: &Tensor, bound: f64) -> Result<()> {
    for_stored!(tensor.dtype(), T => with_mut_slice(tensor, |x: &mut [T]| {
        reduce::clamp(x, bound);
        Ok(())
    }))
}

/// Computes `sum += factor * tensor` on contiguous CPU tensors with separate storages; `sum` has the wide dtype.
pub(crate) fn add_scaled(sum: &Tensor, tensor: &Tensor, factor: f64) -> Result<()> {
    for_stored!(tensor.dtype(), T => read(tensor, |x: &[T]| {
        with_mut_slice(sum, |sum: &mut [<T as Stored>::Wide]| {
            reduce::add_scaled(sum, x, factor);
            Ok(())
        })
    }))
}
