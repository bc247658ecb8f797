//! The tensors that attention is given: checked, and read where they are.

use super::OP;
use crate::{Error, Result};
use candle_core::{DType, Shape, Storage, Tensor};

/// Whether a run can read this tensor.
pub(super) fn check(what: &str, tensor: &Tensor, planned: &Shape) -> Result<()> {
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
    if tensor.dtype() != DType::F32 {
        return Err(Error::DType {
            op: OP,
            expected: format!("{what} in f32"),
            got: tensor.dtype().as_str().into(),
            hint: "convert it, or use attention::naive or attention::flash".into(),
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

/// Calls `f` with the elements of contiguous tensors in f32 on the CPU.
pub(super) fn with_arguments(
    tensors: &[&Tensor],
    f: impl FnOnce(&[&[f32]]) -> Result<()>,
) -> Result<()> {
    let guards: Vec<_> = tensors.iter().map(|x| x.storage_and_layout()).collect();
    let arguments = guards.iter().map(|(storage, layout)| {
        let (start, end) = layout.contiguous_offsets().unwrap_or((0, 0)); // checked
        match &**storage {
            Storage::Cpu(storage) => Ok(&storage.as_slice::<f32>()?[start..end]),
            _ => candle_core::bail!("{OP}: expected a tensor on the CPU"),
        }
    });
    f(&arguments.collect::<candle_core::Result<Vec<_>>>()?)
}
