//! What attention is given: checked.

use super::OP;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};

/// Whether a run of what was planned for that shape, dtype and device can read this tensor.
pub(super) fn check(
    what: &str,
    tensor: &Tensor,
    planned: &Shape,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    if tensor.shape() != planned {
        return Err(Error::Shape {
            op: OP,
            expected: format!("{what} {:?}, as planned", planned.dims()),
            got: format!("{:?}", tensor.dims()),
            hint: "plan another for that shape: AttentionPlanConfig".into(),
        });
    }
    if !tensor.device().same_device(device) {
        return Err(Error::Placement {
            op: OP,
            expected: format!("{what} on {:?}, as planned", device.location()),
            got: format!("{:?}", tensor.device().location()),
            hint: "move it, or plan another there: Attention::new(device, ..)".into(),
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

/// Whether flash attention's kernels on a GPU can read it: they move 16 bytes at a time.
pub(super) fn check_start(what: &str, tensor: &Tensor) -> Result<()> {
    let start = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    match start % 16 {
        0 => Ok(()),
        _ => Err(Error::Shape {
            op: OP,
            expected: format!("{what} from a multiple of 16 bytes on in its storage"),
            got: format!("byte {start}"),
            hint: "pass tensor.force_contiguous()?: a planned run copies nothing".into(),
        }),
    }
}
