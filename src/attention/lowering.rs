//! Operands, sizes and attributes that the lowerings of both algorithms share.

use super::SOFT_CAP;
use crate::graph::Attribute;
use crate::kernels::attention::Sizes;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::flash_attention::ProbabilityDropout;
use crate::kernels::{Dropout, DropoutMask, Mask};
use crate::ops::dropout::dropout_from_attributes;
#[cfg(feature = "cuda")]
use crate::ops::lowering::Operands;
use crate::ops::lowering::{Calls, Check, Kernel, Named, Signature, Slices, Slot, Workspace};
use candle_core::Result;

const INPUTS: [(&str, Slot); 3] = [
    ("q", Slot::Input(0)),
    ("k", Slot::Input(1)),
    ("v", Slot::Input(2)),
];
/// Returns which of `count` extra inputs are the first keys and the dropout key.
pub(crate) fn reads(count: usize, drops: bool) -> [Option<usize>; 2] {
    let key = if drops { count.checked_sub(1) } else { None };
    [key.unwrap_or(count).checked_sub(1), key]
}

/// Returns which extra inputs of an op are the first keys and the dropout key.
fn reads_of(signature: &Signature<'_>) -> [Option<usize>; 2] {
    let drops = dropout_from_attributes(signature.attributes).is_some();
    reads(signature.extra_inputs.len(), drops)
}

/// Returns q, k and v and the extra inputs.
pub(super) fn inputs(signature: &Signature<'_>) -> Named<Slot> {
    let [first_keys, key] = reads_of(signature).map(|read| read.map(Slot::ExtraInput));
    let inputs = Named::from(INPUTS).with_some("first_keys", first_keys);
    inputs.with_some("dropout_key", key)
}

/// Returns an empty list of calls, which checks the first keys in each run if there are any.
pub(super) fn checked(signature: &Signature<'_>) -> Calls {
    match reads_of(signature)[0] {
        None => Calls::default(),
        Some(read) => Calls::default().checked(read, Check::FirstKeys),
    }
}

/// Returns the first keys (B, Tq); empty if there are none.
pub(super) fn first_keys<'a>(s: &Slices<'a>) -> Result<&'a [u32]> {
    Ok(s.some_x("first_keys")?.unwrap_or_default())
}

/// Returns the dropout mask of a call with `keys` keys, if it has dropout.
pub(super) fn dropout_mask(
    dropout: Option<Dropout>,
    s: &Slices<'_>,
    keys: usize,
) -> Result<Option<DropoutMask>> {
    let mask = dropout.map(|dropout| Ok(dropout.mask(s.x("dropout_key")?, keys)));
    mask.transpose()
}

/// Returns the dropout of a call on a GPU, if it has any.
#[cfg(feature = "cuda")]
pub(super) fn dropped<'a>(
    dropout: Option<Dropout>,
    l: &Operands<'a>,
) -> Result<Option<ProbabilityDropout<'a>>> {
    let dropped = dropout.map(|dropout| {
        let key = l.x("dropout_key")?;
        Ok(ProbabilityDropout { dropout, key })
    });
    dropped.transpose()
}

pub(super) const GRADIENTS: [(&str, Slot); 3] = [
    ("dq", Slot::Gradient(0)),
    ("dk", Slot::Gradient(1)),
    ("dv", Slot::Gradient(2)),
];

/// Returns (product of the leading dimensions, length, width) of q, k or v.
pub(super) fn matrices(dims: &[usize]) -> [usize; 3] {
    match *dims {
        [ref leading @ .., length, width] => [leading.iter().product(), length, width],
        _ => [1, 1, 1], // refused by the op
    }
}

/// Adds the sizes and FLOPs of a call to its kernel; `passes` counts pairs of matmuls.
pub(super) fn sized_as(kernel: Kernel, signature: &Signature<'_>, passes: f64) -> Kernel {
    let [q, k, v] = [0, 1, 2].map(|i| matrices(signature.inputs[i].dims));
    let batch = match signature.inputs[0].dims {
        [leading @ .., _, _, _] => leading.iter().product(),
        _ => 1,
    };
    let sizes = Sizes {
        batch,
        heads: q[0].checked_div(batch).unwrap_or(0),
        kv_heads: k[0].checked_div(batch).unwrap_or(0),
        queries: q[1],
        keys: k[1],
        head_dim: q[2],
        value_dim: v[2],
        mask: Mask::Full, // mask, scale and cap are attributes
        scale: 1.0,
        soft_cap: None,
    };
    sized(kernel, &sizes, signature.attributes, passes)
}

/// Adds sizes, FLOPs and attributes (mask, scale, cap) to a kernel.
pub(super) fn sized(
    kernel: Kernel,
    sizes: &Sizes,
    attributes: &[(&'static str, Attribute)],
    passes: f64,
) -> Kernel {
    let scores = (sizes.matrices() * sizes.queries) as f64 * sizes.keys as f64;
    let multiplied = scores * (sizes.head_dim + sizes.value_dim) as f64;
    let kernel = kernel.sized([
        ("batch", sizes.batch),
        ("heads", sizes.heads),
        ("kv_heads", sizes.kv_heads),
        ("queries", sizes.queries),
        ("keys", sizes.keys),
        ("head_dim", sizes.head_dim),
        ("value_dim", sizes.value_dim),
    ]);
    kernel
        .with_all(attributes)
        .costing(2.0 * passes * multiplied)
        .scoring(scores)
}

/// Adds the scratch memory that the kernel needs on the CPU.
pub(super) fn with_workspace(
    kernel: Kernel,
    workspace: impl FnOnce(&Sizes) -> Workspace,
) -> Kernel {
    match sizes(&kernel) {
        Ok(sizes) => kernel.with_workspace(workspace(&sizes)),
        Err(_) => kernel, // refused by the op
    }
}

/// Returns the sizes of a planned call.
pub(super) fn sizes(k: &Kernel) -> Result<Sizes> {
    Ok(Sizes {
        batch: k.count("batch")?,
        heads: k.count("heads")?,
        kv_heads: k.count("kv_heads")?,
        queries: k.count("queries")?,
        keys: k.count("keys")?,
        head_dim: k.count("head_dim")?,
        value_dim: k.count("value_dim")?,
        mask: k.mask()?,
        scale: k.number("scale")?,
        soft_cap: k.some_number(SOFT_CAP),
    })
}
