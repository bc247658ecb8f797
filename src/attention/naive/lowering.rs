//! Naive attention as calls of kernels, on heads one after another.

use super::op::workspaces;
use crate::attention::lowering::{
    GRADIENTS, checked, first_keys, inputs, matrices, sized, sizes, with_workspace,
};
use crate::graph::Target;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::naive;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::naive_attention::{self, HeadGroups};
use crate::kernels::workspace;
use crate::ops::lowering::{Calls, Lowering, Named, Signature, Slices, Slot, kernel, on_gpu};
#[cfg(feature = "cuda")]
use crate::ops::lowering::{Kernel, Operands};
use candle_core::{DType, Result};

pub(in crate::attention) const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("naive_attention", |T, k, s| {
            let sizes = sizes(k)?;
            let lse = s.some_y("lse")?.unwrap_or_default();
            naive::forward(&sizes, operands::<T>(s)?, s.y("p")?, lse, s.y("out")?);
        });
        let kernel = with_workspace(sized(kernel, signature, 1.0), |sizes| {
            workspaces(sizes, signature.output.dtype)[0]
        });
        let kernel = on_gpu!(kernel, |k, l| forward(k, l));
        let mut calls = checked(signature);
        let mut writes = vec![("out", Slot::Output), ("p", Slot::Kept(0))];
        if signature.kept.len() > 1 {
            writes.push(("lse", Slot::Kept(1)));
        }
        if let Some(some) = scores_at_once(signature)
            && signature.output.dtype != DType::F32
        {
            writes.push(("scores", calls.scratch(&some, DType::F32)));
        }
        calls.call(kernel, inputs(signature), writes)
    },
    backward: |signature| {
        let kernel = kernel!("naive_attention_backward", |T, k, s| {
            let sizes = sizes(k)?;
            let (d_out, p) = (s.x("d_out")?, s.x("p")?);
            let gradients = [s.y("dq")?, s.y("dk")?, s.y("dv")?];
            naive::backward(&sizes, operands::<T>(s)?, d_out, p, gradients);
        });
        let kernel = with_workspace(sized(kernel, signature, 2.0), |sizes| {
            workspaces(sizes, signature.output.dtype)[1]
        });
        let kernel = on_gpu!(kernel, |k, l| backward(k, l));
        let reads = Named::from([("d_out", Slot::OutputGradient)]).and(inputs(signature));
        let reads = reads.with("p", Slot::Kept(0));
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

fn operands<'a, T: Stored>(s: &Slices<'a>) -> Result<naive::Inputs<'a, T>> {
    Ok(naive::Inputs {
        q: s.x("q")?,
        k: s.x("k")?,
        v: s.x("v")?,
        first_keys: first_keys(s)?,
    })
}

/// On a GPU, the scores of as many heads of k and v as naive attention has at once there, in half precision beside the
/// probabilities.
fn scores_at_once(signature: &Signature<'_>) -> Option<[usize; 3]> {
    let [q, k] = [0, 1].map(|i| matrices(signature.inputs[i].dims));
    let of_head = (q[0] / k[0].max(1)) * q[1] * k[1];
    let heads = workspace::naive_heads_at_once(k[0], of_head, signature.output.dtype);
    (signature.target == Target::Cuda).then_some([heads, of_head / k[1].max(1), k[1]])
}

/// Launches it. Writes out, the probabilities and, in half precision, the scores of some heads in f32.
#[cfg(feature = "cuda")]
fn forward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let heads = HeadGroups::of(&sizes(k)?, l.some_x("first_keys"));
    let (out, p) = (l.y("out")?, l.y("p")?);
    let scores = l.some_y("scores").unwrap_or(p); // f32's in the same place
    let qkv = [l.x("q")?, l.x("k")?, l.x("v")?];
    let multiply = &mut l.multiplier();
    naive_attention::forward(l.gpu, multiply, &heads, qkv, scores, p, out)
}

/// Reads d_out, q, k, v and the probabilities; writes dq, dk, dv and, of some heads, the probabilities' gradients in
/// f32 and, in half precision, the scores'.
#[cfg(feature = "cuda")]
fn backward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let heads = HeadGroups::of(&sizes(k)?, l.some_x("first_keys"));
    let inputs = [l.x("d_out")?, l.x("q")?, l.x("k")?, l.x("v")?, l.x("p")?];
    let gradients = [l.y("dq")?, l.y("dk")?, l.y("dv")?];
    let dp = l.y("dp")?;
    let ds = l.some_y("dscores").unwrap_or(dp); // f32's in the same place
    let multiply = &mut l.multiplier();
    naive_attention::backward(l.gpu, multiply, &heads, inputs, [dp, ds], gradients)
}
