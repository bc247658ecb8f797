//! The tensors that attention is given: checked, and read where they are.

use super::OP;
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor};

/// The dtypes that attention is planned in.
pub(super) fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        _ => Err(Error::DType {
            op: OP,
            expected: "f32, bf16 or f16".into(),
            got: dtype.as_str().into(),
            hint: "attention::naive and attention::flash take others".into(),
        }),
    }
}

/// Whether a run can read this tensor.
pub(super) fn check(what: &str, tensor: &Tensor, planned: &Shape, dtype: DType) -> Result<()> {
    if tensor.shape() != planned {
        return Err(Error::Shape {
            op: OP,
            expected: format!("{what} {:?}, as planned", planned.dims()),
            got: format!("{:?}", tensor.dims()),
            hint: format!(
                "plan another for that shape: Attention::new({:?}, ..)",
                tensor.dims()
            ),
        });
    }
    if !tensor.device().is_cpu() {
        return Err(Error::Placement {
            op: OP,
            expected: format!("{what} on the CPU"),
            got: format!("{:?}", tensor.device().location()),
            hint: "attention::naive and attention::flash run there".into(),
        });
    }
    if tensor.dtype() != dtype {
        return Err(Error::DType {
            op: OP,
            expected: format!("{what} in {}, as planned", dtype.as_str()),
            got: tensor.dtype().as_str().into(),
            hint: "convert it, or plan another for that dtype".into(),
        });
    }
    if !tensor.is_contiguous() {
        return Err(Error::Shape {
            op: OP,
            expected: format!("{what} contiguous"),
            got: format!("strides {:?}", tensor.stride()),
            hint: "pass tensor.contiguous()?: a planned run copies nothing".into(),
        });
    }
    Ok(())
}

/// Calls `f` with the bytes of contiguous tensors on the CPU, in a dtype that attention is planned in.
pub(super) fn with_arguments(
    tensors: &[&Tensor],
    f: impl FnOnce(&[*const [u8]]) -> Result<()>,
) -> Result<()> {
    let guards: Vec<_> = tensors.iter().map(|x| x.storage_and_layout()).collect();
    let arguments = guards.iter().map(|(storage, layout)| {
        let (start, end) = layout.contiguous_offsets().unwrap_or((0, 0)); // checked
        match &**storage {
            Storage::Cpu(CpuStorage::F32(x)) => Ok(bytes(&x[start..end])),
            Storage::Cpu(CpuStorage::BF16(x)) => Ok(bytes(&x[start..end])),
            Storage::Cpu(CpuStorage::F16(x)) => Ok(bytes(&x[start..end])),
            _ => candle_core::bail!("{OP}: expected a tensor in f32, bf16 or f16 on the CPU"),
        }
    });
    f(&arguments.collect::<candle_core::Result<Vec<_>>>()?)
}

/// Where the elements lie, and how many bytes they are.
fn bytes<T>(elements: &[T]) -> *const [u8] {
    let start = elements.as_ptr().cast();
    std::ptr::slice_from_raw_parts(start, size_of_val(elements))
}
