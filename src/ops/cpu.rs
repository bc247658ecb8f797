//! Between candle's CPU storage and the kernels' slices.

use super::lowering::Slice;
use super::operand::{check_granted, check_room, inside_storage};
use crate::kernels::cpu::{gemm, parallel};
use crate::{graph, hardware};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use std::ops::Range;

pub(crate) use crate::inplace::{for_real, for_stored};

fn contiguous_range(layout: &Layout) -> Result<Range<usize>> {
    if layout.dims().contains(&0) {
        return Ok(0..0); // it may begin beyond its storage
    }
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("a kernel was handed a strided tensor: {layout:?}"),
    }
}

/// The elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    Ok(&storage.as_slice::<T>()?[contiguous_range(layout)?])
}

/// The elements of an operand of any of the kernels' dtypes, to be read: one after another, or heads by strides.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Slice<'a>> {
    fn of<'a, T: WithDType>(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Slice<'a>> {
        let slice = |elements: &'a [T]| {
            let start = elements.as_ptr().cast_mut().cast();
            // SAFETY: they are borrowed for as long.
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
    match storage.dtype() {
        DType::U32 => of::<u32>(storage, layout),
        dtype => for_stored!(dtype, T => of::<T>(storage, layout)),
    }
}

/// Room for what a kernel writes all of before anybody reads it.
///
/// # Safety
/// The slice is used while the storage is there, and the storage is not.
pub(super) unsafe fn room<'a>(dims: &[usize], dtype: DType) -> Result<(CpuStorage, Slice<'a>)> {
    for_stored!(dtype, T => {
        let (mut start, mut elements) = (std::ptr::null_mut(), 0);
        let (storage, _) = output::<T>(dims, |all| {
            (start, elements) = (all.as_mut_ptr(), all.len());
        })?;
        // SAFETY: they are there for as long as the storage.
        Ok((storage, unsafe { Slice::new(start.cast(), elements, dtype) }))
    })
}

/// What a CPU tensor's storage lock guards.
pub(crate) fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(cpu) => Ok(cpu),
        other => bail!(
            "a CPU kernel was handed a tensor on {:?}",
            other.device().location()
        ),
    }
}

/// A buffer that `fill` writes completely, or the error that there is no room for it.
fn buffer<T: WithDType>(len: usize, fill: impl FnOnce(&mut [T])) -> Result<Vec<T>> {
    const WHAT: &str = "one tensor";
    hardware::check_threads()?;
    let wanted_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    check_room(WHAT, wanted_bytes)?;
    parallel::filled(len, fill).map_err(|_| hardware::not_granted(WHAT, wanted_bytes).into())
}

/// Has all threads of the current pool allocate what they keep for matmuls, `in_half` precision or not.
pub(crate) fn reserve_scratch(in_half: bool) -> crate::Result<()> {
    let wanted_bytes = gemm::scratch_bytes(in_half) as u64;
    let reserved = gemm::reserve_scratch(in_half);
    reserved.map_err(|_| hardware::not_granted("the scratch of threads for matmuls", wanted_bytes))
}

/// How many elements a result has.
fn elements_of(shape: &Shape) -> Result<usize> {
    let count = shape
        .dims()
        .iter()
        .try_fold(1usize, |n, dim| n.checked_mul(*dim));
    count.ok_or_else(|| {
        candle_core::Error::msg(format!("{shape:?} has more elements than can be counted"))
    })
}

/// What a custom op's forward returns: elements that `fill` writes, as storage.
pub(crate) fn output<T: WithDType>(
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [T]),
) -> Result<(CpuStorage, Shape)> {
    let shape = shape.into();
    let data = buffer(elements_of(&shape)?, fill)?;
    Ok((T::to_cpu_storage_owned(data), shape))
}

/// Checks token ids in u32 or i64 against the vocabulary before any kernel sees them. Returns them in u32 on the host,
/// flattened ([`narrow_id`]); in a trace, which does not know the elements, the tensor as it came.
///
/// `ignore` passes too, also where it is negative.
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
    // u32::MAX is what `narrow_id` makes of an ignored id, so it is no token.
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

/// A checked id as kernels read it. One outside u32 is an ignored one, since nothing else passes [`ids`].
pub(crate) fn narrow_id(id: i64) -> u32 {
    u32::try_from(id).unwrap_or(u32::MAX)
}
