//! Operands, sizes and attributes that the lowerings of both algorithms share.

use super::SOFT_CAP;
use crate::graph::Attribute;
use crate::kernels::attention::{PerScore, Sizes};
use crate::kernels::cpu::Real;
use crate::kernels::cpu::attention::flash::Masks;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::flash_attention::ProbabilityDropout;
use crate::kernels::{Dropout, DropoutMask, Mask};
use crate::ops::dropout::dropout_from_attributes;
#[cfg(feature = "cuda")]
use crate::ops::lowering::Operands;
use crate::ops::lowering::{Calls, Check, Kernel, Named, Signature, Slices, Slot, Workspace};
use candle_core::{DType, Result};

const INPUTS: [(&str, Slot); 3] = [
    ("q", Slot::Input(0)),
    ("k", Slot::Input(1)),
    ("v", Slot::Input(2)),
];
/// The indices of first keys, key mask and dropout key among the extra inputs of an op.
#[derive(Default)]
pub(crate) struct Reads {
    pub first_keys: Option<usize>,
    pub visible: Option<usize>,
    pub dropout_key: Option<usize>,
}

impl Reads {
    /// Finds them among extra inputs of these dtypes: only a key mask is in u8, and a dropout key is the last.
    pub fn of(dtypes: &[DType], drops: bool) -> Self {
        let dropout_key = dtypes.len().checked_sub(1).filter(|_| drops);
        let mut masks = (0..dropout_key.unwrap_or(dtypes.len())).rev();
        let visible = masks.clone().find(|i| dtypes[*i] == DType::U8);
        Self {
            first_keys: masks.find(|i| Some(*i) != visible),
            visible,
            dropout_key,
        }
    }

    fn of_call(signature: &Signature<'_>) -> Self {
        let dtypes = signature.extra_inputs.iter().map(|x| x.dtype);
        let drops = dropout_from_attributes(signature.attributes).is_some();
        Self::of(&dtypes.collect::<Vec<_>>(), drops)
    }
}

/// Returns q, k and v, the bias, and the extra inputs.
pub(super) fn inputs(signature: &Signature<'_>) -> Named<Slot> {
    let reads = Reads::of_call(signature);
    let bias = (signature.inputs.len() > 3).then_some(Slot::Input(3));
    let inputs = Named::from(INPUTS).with_some("bias", bias);
    let inputs = inputs.with_some("first_keys", reads.first_keys.map(Slot::ExtraInput));
    let inputs = inputs.with_some("visible", reads.visible.map(Slot::ExtraInput));
    inputs.with_some("dropout_key", reads.dropout_key.map(Slot::ExtraInput))
}

/// Returns an empty list of calls, which checks the first keys in each run if there are any.
pub(super) fn checked(signature: &Signature<'_>) -> Calls {
    match Reads::of_call(signature).first_keys {
        None => Calls::default(),
        Some(read) => Calls::default().checked(read, Check::FirstKeys),
    }
}

/// The attributes with the dimensions of the key mask and of the bias.
const VISIBLE_DIMS: [&str; 4] = ["visible_b", "visible_h", "visible_q", "visible_k"];
const BIAS_DIMS: [&str; 4] = ["bias_b", "bias_h", "bias_q", "bias_k"];

/// Adds the dimensions of the key mask and of the bias, if there are any.
pub(super) fn with_masks(kernel: Kernel, signature: &Signature<'_>) -> Kernel {
    let visible = Reads::of_call(signature).visible;
    let visible = visible.map(|i| (VISIBLE_DIMS, signature.extra_inputs[i].dims));
    let bias = signature.inputs.get(3).map(|x| (BIAS_DIMS, x.dims));
    let masks = visible.into_iter().chain(bias);
    masks.fold(kernel, |kernel, (names, dims)| match *dims {
        [b, h, q, k] => kernel.sized([0, 1, 2, 3].map(|i| (names[i], [b, h, q, k][i]))),
        _ => kernel, // refused by the op
    })
}

/// Returns whether a call has a key mask or a bias.
pub(super) fn is_masked(signature: &Signature<'_>) -> bool {
    signature.inputs.len() > 3 || Reads::of_call(signature).visible.is_some()
}

/// Returns the key mask and the bias of a planned call.
pub(super) fn masks<'a, T: Real>(k: &Kernel, s: &Slices<'a>) -> Result<Masks<'a, T>> {
    let visible = s.some_x("visible")?.map(|visible| {
        let dims = dims_of(k, VISIBLE_DIMS)?;
        Result::Ok(PerScore::new(visible, dims))
    });
    let bias = s.some_x("bias")?.map(|bias| {
        let dims = bias_dims(k)?;
        Result::Ok(PerScore::new(bias, dims))
    });
    Ok(Masks {
        visible: visible.transpose()?,
        bias: bias.transpose()?,
    })
}

/// Returns the dimensions of the bias of a planned call.
pub(super) fn bias_dims(k: &Kernel) -> Result<[usize; 4]> {
    dims_of(k, BIAS_DIMS)
}

fn dims_of(k: &Kernel, [b, h, q, l]: [&str; 4]) -> Result<[usize; 4]> {
    Ok([k.count(b)?, k.count(h)?, k.count(q)?, k.count(l)?])
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
