//! The lowering of naive attention to kernel calls, on contiguous heads.

use super::op::workspaces;
#[cfg(feature = "cuda")]
use crate::attention::in_rows::{self, DQKV, QKV, as_q, as_qkv};
use crate::attention::lowering::{
    GRADIENTS, checked, first_keys, inputs, matrices, sized_as, sizes, with_workspace,
};
use crate::graph::Target;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::naive;
use crate::kernels::workspace;
#[cfg(feature = "cuda")]
use crate::kernels::{
    attention::Sizes,
    cuda::naive_attention::{self, HeadGroups},
};
#[cfg(feature = "cuda")]
use crate::ops::lowering::Operands;
use crate::ops::lowering::{
    Calls, Kernel, Lowering, Named, Signature, Slices, Slot, kernel, on_gpu,
};
use candle_core::{DType, Result};

pub(in crate::attention) const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = with_workspace(sized_as(forward_kernel(), signature, 1.0), |sizes| {
            workspaces(sizes, signature.output.dtype)[0]
        });
        let mut calls = checked(signature);
        let mut writes = vec![("out", Slot::Output), ("p", Slot::Saved(0))];
        if signature.saved.len() > 1 {
            writes.push(("lse", Slot::Saved(1)));
        }
        if let Some(some) = scores_at_once(signature)
            && signature.output.dtype != DType::F32
        {
            writes.push(("scores", calls.scratch(&some, DType::F32)));
        }
        calls.call(kernel, inputs(signature), writes)
    },
    backward: |signature| {
        let kernel = with_workspace(sized_as(backward_kernel(), signature, 2.0), |sizes| {
            workspaces(sizes, signature.output.dtype)[1]
        });
        let reads = Named::from([("d_out", Slot::OutputGradient)]).and(inputs(signature));
        let reads = reads.with("p", Slot::Saved(0));
        let mut calls = Calls::default();
        let mut writes = GRADIENTS.to_vec();
        if let Some(some) = scores_at_once(signature) {
            let dtype = signature.output.dtype;
            writes.push(("dp", calls.scratch(&some, DType::F32)));
            if dtype != DType::F32 {
                writes.push(("dscores", calls.scratch(&some, dtype)));
            }
        }
        calls.call(kernel, reads, writes)
    },
};

/// Returns the forward kernel, without sizes.
pub(in crate::attention) fn forward_kernel() -> Kernel {
    let kernel = kernel!("naive_attention", |T, k, s| {
        let sizes = sizes(k)?;
        let lse = s.some_y("lse")?.unwrap_or_default();
        naive::forward(&sizes, operands::<T>(s)?, s.y("p")?, lse, s.y("out")?);
    });
    on_gpu!(kernel, |k, l| forward(k, l))
}

/// Returns the backward kernel, without sizes.
pub(in crate::attention) fn backward_kernel() -> Kernel {
    let kernel = kernel!("naive_attention_backward", |T, k, s| {
        let sizes = sizes(k)?;
        let (d_out, p) = (s.x("d_out")?, s.x("p")?);
        let gradients = [s.y("dq")?, s.y("dk")?, s.y("dv")?];
        naive::backward(&sizes, operands::<T>(s)?, d_out, p, gradients);
    });
    on_gpu!(kernel, |k, l| backward(k, l))
}

fn operands<'a, T: Stored>(s: &Slices<'a>) -> Result<naive::Inputs<'a, T>> {
    Ok(naive::Inputs {
        q: s.x("q")?,
        k: s.x("k")?,
        v: s.x("v")?,
        first_keys: first_keys(s)?,
    })
}

/// Returns the shape of the scores that naive attention computes at a time on a GPU: those of several heads of k and v.
/// In half precision they are in addition to the probabilities.
fn scores_at_once(signature: &Signature<'_>) -> Option<[usize; 3]> {
    let [q, k] = [0, 1].map(|i| matrices(signature.inputs[i].dims));
    let of_head = (q[0] / k[0].max(1)) * q[1] * k[1];
    let heads = workspace::naive_heads_per_pass(k[0], of_head, signature.output.dtype);
    (signature.target == Target::Cuda).then_some([heads, of_head / k[1].max(1), k[1]])
}

/// Writes out, the probabilities and, in half precision, the scores of some heads in f32.
#[cfg(feature = "cuda")]
fn forward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let qkv = as_qkv(k, &sizes, &l.reads, QKV, dims(&sizes));
    let out = as_q(k, &sizes, l.y("out")?, out_dims(&sizes));
    let p = l.y("p")?;
    let scores = l.some_y("scores").unwrap_or(p); // f32's in the same place
    let (heads, multiply) = (groups(k, &sizes, l), &mut l.multiply_batch());
    naive_attention::forward(l.gpu, multiply, &heads, qkv, scores, p, out)
}

/// Reads d_out, q, k, v and the probabilities; writes dq, dk, dv and, of some heads, the probabilities' gradients in
/// f32 and, in half precision, the scores'.
#[cfg(feature = "cuda")]
fn backward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let [q, keys, v] = as_qkv(k, &sizes, &l.reads, QKV, dims(&sizes));
    let d_out = as_q(k, &sizes, l.x("d_out")?, out_dims(&sizes));
    let inputs = [d_out, q, keys, v];
    let gradients = as_qkv(k, &sizes, &l.writes, DQKV, dims(&sizes));
    let dp = l.y("dp")?;
    let ds = l.some_y("dscores").unwrap_or(dp); // f32's in the same place
    let (heads, multiply) = (groups(k, &sizes, l), &mut l.multiply_batch());
    naive_attention::backward(
        l.gpu,
        multiply,
        &heads,
        inputs,
        l.x("p")?,
        [dp, ds],
        gradients,
    )
}

/// Returns the heads of one batched matmul: those of a sequence if heads are in rows, else all.
#[cfg(feature = "cuda")]
fn groups<'a>(k: &Kernel, sizes: &Sizes, l: &Operands<'a>) -> HeadGroups<'a> {
    let all = HeadGroups::of(sizes, l.some_x("first_keys"));
    match in_rows::are(k) {
        true => HeadGroups {
            kv_heads: sizes.kv_heads,
            ..all
        },
        false => all,
    }
}

/// The dimensions of q, k and v, where these are one after another: the rows of q's heads that share one of k and v are
/// one matrix.
#[cfg(feature = "cuda")]
fn dims(sizes: &Sizes) -> [[usize; 4]; 3] {
    let (heads, rows) = (sizes.kv_matrices(), sizes.group() * sizes.queries);
    [
        [1, heads, rows, sizes.head_dim],
        [1, heads, sizes.keys, sizes.head_dim],
        [1, heads, sizes.keys, sizes.value_dim],
    ]
}

/// The dimensions of out and its gradient, likewise.
#[cfg(feature = "cuda")]
fn out_dims(sizes: &Sizes) -> [usize; 4] {
    let rows = sizes.group() * sizes.queries;
    [1, sizes.kv_matrices(), rows, sizes.value_dim]
}
