//! Candle tensors as slices that can be written, several at a time, on the CPU; and what is made of that.

use crate::Result;
use crate::kernels::cpu::{Stored, reduce};
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};
use half::{bf16, f16};
use std::cell::Cell;

/// Element types found in candle's CPU storage, for writing. (candle offers the same for reading.)
pub(crate) trait Element: Stored {
    /// The storage's elements, if they are of this type.
    fn elements(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($($variant:ident: $T:ty),+) => {$(
        impl Element for $T {
            fn elements(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
        }
    )+};
}
element!(F32: f32, F64: f64, F16: f16, BF16: bf16);

/// An in-place op that hands a tensor's elements to a function.
struct Lend<T, F>(Cell<Option<F>>, std::marker::PhantomData<T>);

impl<T: Element, F: FnOnce(&mut [T]) -> candle_core::Result<()>> InplaceOp1 for Lend<T, F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let range = layout.contiguous_offsets();
        match (T::elements(storage), range, self.0.take()) {
            (Some(elements), Some((start, end)), Some(f)) => f(&mut elements[start..end]),
            _ => candle_core::bail!("expected a contiguous tensor of {}", T::DTYPE.as_str()),
        }
    }
}

/// Calls `f` with the elements of a contiguous CPU tensor of `T`, for writing.
///
/// Calls nest, which gives several tensors at once. Inside, touching any tensor on a lent storage deadlocks.
pub(crate) fn with_mut_slice<T: Element>(
    tensor: &Tensor,
    f: impl FnOnce(&mut [T]) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    tensor.inplace_op1(&Lend(Cell::new(Some(f)), std::marker::PhantomData))
}

/// An in-place op that hands a tensor's memory to a function.
struct LendMemory<F>(Cell<Option<F>>);

impl<F: FnOnce(*mut u8, usize)> InplaceOp1 for LendMemory<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("expected a contiguous tensor");
        };
        let first: *mut u8 = match storage {
            CpuStorage::U8(x) => x[start..end].as_mut_ptr(),
            CpuStorage::U32(x) => x[start..end].as_mut_ptr().cast(),
            CpuStorage::I64(x) => x[start..end].as_mut_ptr().cast(),
            CpuStorage::F16(x) => x[start..end].as_mut_ptr().cast(),
            CpuStorage::BF16(x) => x[start..end].as_mut_ptr().cast(),
            CpuStorage::F32(x) => x[start..end].as_mut_ptr().cast(),
            CpuStorage::F64(x) => x[start..end].as_mut_ptr().cast(),
            _ => candle_core::bail!("expected floats, u8, u32 or i64"),
        };
        if let Some(f) = self.0.take() {
            f(first, end - start);
        }
        Ok(())
    }
}

/// Calls `f` with the first element of a contiguous CPU tensor of any dtype but the smallest floats, for writing, and
/// how many there are.
pub(crate) fn with_mut_memory(
    tensor: &Tensor,
    f: impl FnOnce(*mut u8, usize),
) -> candle_core::Result<()> {
    tensor.inplace_op1(&LendMemory(Cell::new(Some(f))))
}

/// As [`with_mut_slice`] for all of `tensors` at once, which must be on storages of their own: `f` gets their elements,
/// in order.
pub(crate) fn with_mut_slices<T: Element>(
    tensors: &[&Tensor],
    f: impl FnOnce(&[*mut [T]]),
) -> candle_core::Result<()> {
    // Behind a pointer, or every level would be a type of its own.
    type Borrower<'f, T> = Box<dyn FnOnce(&[*mut [T]]) + 'f>;

    fn lend_rest<T: Element>(
        tensors: &[&Tensor],
        lent: &mut Vec<*mut [T]>,
        f: Borrower<'_, T>,
    ) -> candle_core::Result<()> {
        match tensors {
            [] => {
                f(lent);
                Ok(())
            }
            [first, rest @ ..] => with_mut_slice(first, |elements: &mut [T]| {
                lent.push(elements);
                lend_rest(rest, lent, f)
            }),
        }
    }
    lend_rest(tensors, &mut Vec::with_capacity(tensors.len()), Box::new(f))
}

/// Calls `f` with the elements of a contiguous CPU tensor of `T`, for reading.
pub(crate) fn read<T: Element, R>(
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => f(&storage.as_slice::<T>()?[start..end]),
        _ => candle_core::bail!("expected a contiguous tensor on the CPU"),
    }
}

/// What tells storages apart: tensors with one address share their elements.
pub(crate) fn storage_address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref(&*storage).addr()
}

/// Whether the kernels take this element type.
pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// What a dispatch by dtype answers to any other.
pub(crate) fn no_kernel<T>(op: &str, dtype: DType) -> candle_core::Result<T> {
    candle_core::bail!("{op}: no kernel for {}", dtype.as_str());
}

/// The type that numbers stored as `dtype` are added up in.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// A scalar tensor's value. Not every device has `f64`, so it is converted on the host.
fn to_f64(scalar: &Tensor) -> Result<f64> {
    let scalar = scalar.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    Ok(scalar.to_scalar()?)
}

/// The sum of the squares of all elements.
pub(crate) fn sum_of_squares(tensor: &Tensor) -> Result<f64> {
    if !tensor.device().is_cpu() {
        let squares = tensor.to_dtype(wide(tensor.dtype()))?.sqr()?.sum_all()?;
        return to_f64(&squares);
    }
    let tensor = tensor.contiguous()?;
    let sum = match tensor.dtype() {
        DType::F32 => read(&tensor, |x: &[f32]| Ok(reduce::sum_of_squares(x))),
        DType::F64 => read(&tensor, |x: &[f64]| Ok(reduce::sum_of_squares(x))),
        DType::F16 => read(&tensor, |x: &[f16]| Ok(reduce::sum_of_squares(x))),
        DType::BF16 => read(&tensor, |x: &[bf16]| Ok(reduce::sum_of_squares(x))),
        other => no_kernel("sum of squares", other),
    }?;
    Ok(sum)
}

/// Whether no element is infinite or NaN.
pub(crate) fn all_finite(tensor: &Tensor) -> Result<bool> {
    if !tensor.device().is_cpu() {
        // 0 times infinity is NaN, and a sum keeps a NaN.
        let zeros = (tensor.to_dtype(wide(tensor.dtype()))? * 0.0)?;
        return Ok(to_f64(&zeros.sum_all()?)? == 0.0);
    }
    let tensor = tensor.contiguous()?;
    let finite = match tensor.dtype() {
        DType::F32 => read(&tensor, |x: &[f32]| Ok(reduce::all_finite(x))),
        DType::F64 => read(&tensor, |x: &[f64]| Ok(reduce::all_finite(x))),
        DType::F16 => read(&tensor, |x: &[f16]| Ok(reduce::all_finite(x))),
        DType::BF16 => read(&tensor, |x: &[bf16]| Ok(reduce::all_finite(x))),
        other => no_kernel("finite check", other),
    }?;
    Ok(finite)
}

/// `tensor *= factor` where it lies: a contiguous CPU tensor.
pub(crate) fn scale(tensor: &Tensor, factor: f64) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => scale_as::<f32>(tensor, factor),
        DType::F64 => scale_as::<f64>(tensor, factor),
        DType::F16 => scale_as::<f16>(tensor, factor),
        DType::BF16 => scale_as::<bf16>(tensor, factor),
        other => no_kernel("scale", other),
    }?;
    Ok(())
}

fn scale_as<T: Element>(tensor: &Tensor, factor: f64) -> candle_core::Result<()> {
    with_mut_slice(tensor, |x: &mut [T]| {
        reduce::scale(x, factor);
        Ok(())
    })
}

/// `tensor = min(max(tensor, -bound), bound)` where it lies: a contiguous CPU tensor.
pub(crate) fn clamp(tensor: &Tensor, bound: f64) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => clamp_as::<f32>(tensor, bound),
        DType::F64 => clamp_as::<f64>(tensor, bound),
        DType::F16 => clamp_as::<f16>(tensor, bound),
        DType::BF16 => clamp_as::<bf16>(tensor, bound),
        other => no_kernel("clamp", other),
    }?;
    Ok(())
}

fn clamp_as<T: Element>(tensor: &Tensor, bound: f64) -> candle_core::Result<()> {
    with_mut_slice(tensor, |x: &mut [T]| {
        reduce::clamp(x, bound);
        Ok(())
    })
}

/// `sum += factor * tensor` where it lies: contiguous CPU tensors on storages of their own, `sum` of the wide type.
pub(crate) fn add_scaled(sum: &Tensor, tensor: &Tensor, factor: f64) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => add_scaled_as::<f32>(sum, tensor, factor),
        DType::F64 => add_scaled_as::<f64>(sum, tensor, factor),
        DType::F16 => add_scaled_as::<f16>(sum, tensor, factor),
        DType::BF16 => add_scaled_as::<bf16>(sum, tensor, factor),
        other => no_kernel("add scaled", other),
    }?;
    Ok(())
}

fn add_scaled_as<T: Element<Wide: Element>>(
    sum: &Tensor,
    tensor: &Tensor,
    factor: f64,
) -> candle_core::Result<()> {
    read(tensor, |x: &[T]| {
        with_mut_slice(sum, |sum: &mut [T::Wide]| {
            reduce::add_scaled(sum, x, factor);
            Ok(())
        })
    })
}
