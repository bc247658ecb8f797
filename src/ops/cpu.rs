//! Conversion between candle's CPU storage and the slices of kernels.

use super::lowering::Slice;
use super::operand::{check_fits_memory, check_granted, inside_storage};
use crate::kernels::cpu::{gemm, parallel};
use crate::{graph, hardware};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use std::ops::Range;

pub(crate) use crate::inplace::{for_any, for_real, for_stored};

fn contiguous_range(layout: &Layout) -> Result<Range<usize>> {
    if layout.dims().contains(&0) {
        return Ok(0..0); // such a view may begin beyond its storage
    }
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("kernel expected a contiguous tensor, got {layout:?}"),
    }
}

/// Returns the elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    Ok(&storage.as_slice::<T>()?[contiguous_range(layout)?])
}

/// Returns the elements of an operand in any dtype of the kernels, for reading: contiguous, or heads with strides.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Slice<'a>> {
    fn of<'a, T: WithDType>(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Slice<'a>> {
        let slice = |elements: &'a [T]| {
            let start = elements.as_ptr().cast_mut().cast();
            // SAFETY: the elements are borrowed for `'a`.
            unsafe { Slice::new(start, elements.len(), T::DTYPE) }
        };
        match layout.stride().try_into() {
            Ok(strides) if !layout.is_contiguous() => {
                let elements = &storage.as_slice::<T>()?[layout.start_offset()..];
                Ok(slice(elements).by_strides(strides))
            }
            _ => Ok(slice(view::<T>(storage, layout)?)),
        }
    }
    for_any!(storage.dtype(), T => of::<T>(storage, layout))
}

/// Allocates an output that a kernel writes completely before it is read.
///
/// # Safety
/// The slice may only be used while the storage is alive and not accessed otherwise.
pub(super) unsafe fn alloc_output<'a>(
    dims: &[usize],
    dtype: DType,
) -> Result<(CpuStorage, Slice<'a>)> {
    for_any!(dtype, T => {
        let (mut start, mut elements) = (std::ptr::null_mut(), 0);
        let (storage, _) = output::<T>(dims, |all| {
            (start, elements) = (all.as_mut_ptr(), all.len());
        })?;
        // SAFETY: the elements live as long as the storage.
        Ok((storage, unsafe { Slice::new(start.cast(), elements, dtype) }))
    })
}

/// Returns the CPU storage behind a tensor's storage lock.
pub(crate) fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(cpu) => Ok(cpu),
        other => bail!(
            "kernel expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

/// Allocates a buffer that `fill` writes completely; an error if there is not enough memory.
fn buffer<T: WithDType>(len: usize, fill: impl FnOnce(&mut [T])) -> Result<Vec<T>> {
    const WHAT: &str = "one tensor";
    hardware::check_threads()?;
    let wanted_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    check_fits_memory(WHAT, wanted_bytes)?;
    parallel::filled(len, fill).map_err(|_| hardware::not_granted(WHAT, wanted_bytes).into())
}

/// Makes all threads of the current pool allocate the scratch that they keep for matmuls, in half precision if
/// `in_half`.
pub(crate) fn reserve_scratch(in_half: bool) -> crate::Result<()> {
    let wanted_bytes = gemm::scratch_bytes(in_half) as u64;
    let reserved = gemm::reserve_scratch(in_half);
    reserved.map_err(|_| hardware::not_granted("the scratch of threads for matmuls", wanted_bytes))
}

fn elements_of(shape: &Shape) -> Result<usize> {
    let count = shape
        .dims()
        .iter()
        .try_fold(1usize, |n, dim| n.checked_mul(*dim));
    count.ok_or_else(|| {
        candle_core::Error::msg(format!("{shape:?} has more elements than can be counted"))
    })
}

/// Returns the output of a custom op's forward: storage whose elements `fill` writes.
pub(crate) fn output<T: WithDType>(
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [T]),
) -> Result<(CpuStorage, Shape)> {
    let shape = shape.into();
    let data = buffer(elements_of(&shape)?, fill)?;
    Ok((T::to_cpu_storage_owned(data), shape))
}

/// Checks token ids in u32 or i64 against the vocabulary before any kernel runs. Returns them in u32 on the host,
/// flattened ([`narrow_id`]). A trace does not know the elements: there the tensor is returned unchanged.
///
/// `ignore` is accepted too, even if it is negative.
pub(crate) fn ids(
    op: &'static str,
    ids: &Tensor,
    vocab_size: usize,
    ignore: Option<i64>,
) -> crate::Result<Tensor> {
    let is_traced = graph::is_tracing();
    let outside = |position: usize, id: i64| crate::Error::TokenId {
        op,
        id,
        position,
        vocab_size,
    };
    if !is_traced {
        let bytes = ids
            .elem_count()
            .saturating_mul(size_of::<u32>() + ids.dtype().size_in_bytes());
        check_granted("ids", bytes as u64)?;
    }
    // `narrow_id` turns an ignored id into u32::MAX, so that is not a token.
    let vocab = 0..vocab_size.min(u32::MAX as usize) as i64;
    let is_in = |id: i64| vocab.contains(&id) || Some(id) == ignore;
    let checked: Vec<u32> = match ids.dtype() {
        DType::U32 | DType::I64 if is_traced => return Ok(ids.clone()),
        DType::U32 => {
            let ids = inside_storage(op, ids)?.flatten_all()?.to_vec1::<u32>()?;
            match ids.iter().position(|id| !is_in((*id).into())) {
                Some(position) => return Err(outside(position, ids[position].into())),
                None => ids,
            }
        }
        DType::I64 => {
            let ids = inside_storage(op, ids)?.flatten_all()?.to_vec1::<i64>()?;
            let ids = ids.into_iter().enumerate();
            let ids = ids.map(|(position, id)| match is_in(id) {
                true => Ok(narrow_id(id)),
                false => Err(outside(position, id)),
            });
            ids.collect::<crate::Result<_>>()?
        }
        dtype => {
            return Err(crate::Error::dtype(op, dtype.as_str())
                .must_be("ids in u32 or i64", "convert with to_dtype(DType::U32)"));
        }
    };
    Ok(Tensor::from_vec(checked, ids.elem_count(), &Device::Cpu)?)
}

/// Returns a checked id as kernels read it. An id outside u32 is an ignored one, because [`ids`] accepts no other.
pub(crate) fn narrow_id(id: i64) -> u32 {
    u32::try_from(id).unwrap_or(u32::MAX)
}
