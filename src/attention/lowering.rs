//! Attention in a plan: naive and flash, on heads one after another.

use super::naive::rooms as naive_rooms;
#[cfg(feature = "cuda")]
use super::{in_model::InModel, lowering_gpu as gpu};
use crate::graph::Target;
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::flash::{self, Heads, Tiles};
use crate::kernels::cpu::attention::naive;
use crate::kernels::workspace;
use crate::ops::lowering::{
    Calls, Kernel, Lowering, Named, Signature, Slices, Slot, kernel, on_gpu,
};
use candle_core::{DType, Result};

/// In a plan.
pub(super) const NAIVE: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("naive_attention", |T, k, s| {
            let sizes = sizes(k)?;
            let (q, k, v) = (s.x::<T>("q")?, s.x("k")?, s.x("v")?);
            let lse = s.some_y("lse")?.unwrap_or_default();
            naive::forward_with_lse(&sizes, q, k, v, s.y("p")?, lse, s.y("out")?);
        });
        let kernel = naive_taking(sized(kernel, signature, 1.0), signature, 0);
        let kernel = on_gpu!(kernel, |k, l| gpu::naive_forward(k, l));
        let mut calls = Calls::default();
        let mut writes = vec![("out", Slot::Output), ("p", Slot::Kept(0))];
        if signature.kept.len() > 1 {
            writes.push(("lse", Slot::Kept(1)));
        }
        if let Some(some) = scores_at_once(signature)
            && signature.output.dtype != DType::F32
        {
            writes.push(("scores", calls.scratch(&some, DType::F32)));
        }
        calls.call(kernel, INPUTS, writes)
    },
    backward: |signature| {
        let kernel = kernel!("naive_attention_backward", |T, k, s| {
            let sizes = sizes(k)?;
            let (q, k, v) = (s.x::<T>("q")?, s.x("k")?, s.x("v")?);
            let (d_out, p) = (s.x("d_out")?, s.x("p")?);
            let (dq, dk, dv) = (s.y("dq")?, s.y("dk")?, s.y("dv")?);
            naive::backward(&sizes, d_out, q, k, v, p, dq, dk, dv);
        });
        let kernel = naive_taking(sized(kernel, signature, 2.0), signature, 1);
        let kernel = on_gpu!(kernel, |k, l| gpu::naive_backward(k, l));
        let reads = Named::from([("d_out", Slot::OutputGradient)]).and(INPUTS);
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

/// In a plan.
pub(super) const FLASH: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!(FLASH_KERNELS[0], |T, k, s| {
            let sizes = sizes(k)?;
            let tiles = Tiles::for_head_dim(sizes.head_dim);
            let outputs = flash::Outputs {
                out: s.y::<T>("out")?,
                rounding_error: s.some_y("rounding_error")?.unwrap_or_default(),
                lse: s.y("lse")?,
            };
            let q = heads::<T>(k, s, "q", Side::Queries)?;
            let [k_heads, v_heads] = ["k", "v"].map(|name| heads(k, s, name, Side::Keys));
            flash::forward(&sizes, &tiles, q, k_heads?, v_heads?, outputs);
        });
        let kernel = on_gpu!(sized(kernel, signature, 1.0), |k, l| gpu::flash_forward(
            k, l
        ));
        let mut calls = Calls::default();
        let mut writes = vec![("out", Slot::Output)];
        writes.extend(kept(signature));
        if signature.target == Target::Cuda {
            let words = [workspace::flash_forward()];
            writes.push(("workspace", calls.scratch(&words, DType::U32)));
        }
        calls.call(kernel, INPUTS, writes)
    },
    backward: |signature| {
        let kernel = kernel!(FLASH_KERNELS[1], |T, k, s| {
            let sizes = sizes(k)?;
            let tiles = Tiles::for_head_dim(sizes.head_dim);
            let of_queries = |name| heads::<T>(k, s, name, Side::Queries);
            let of_keys = |name| heads::<T>(k, s, name, Side::Keys);
            let inputs = flash::Inputs {
                d_out: of_queries("d_out")?,
                q: of_queries("q")?,
                k: of_keys("k")?,
                v: of_keys("v")?,
                out: of_queries("out")?,
                lse: s.x("lse")?,
                rounding_error: match s.has_x("rounding_error") {
                    true => Some(of_queries("rounding_error")?),
                    false => None,
                },
            };
            let gradients = flash::Gradients {
                dq: s.y("dq")?,
                dk: s.y("dk")?,
                dv: s.y("dv")?,
            };
            flash::backward(&sizes, &tiles, inputs, gradients);
        });
        let kernel = on_gpu!(sized(kernel, signature, 2.0), |k, l| gpu::flash_backward(
            k, l
        ));
        let reads = Named::from([("d_out", Slot::OutputGradient)]).and(INPUTS);
        let reads = reads.with("out", Slot::Output).and(kept(signature));
        let mut calls = Calls::default();
        let mut writes = GRADIENTS.to_vec();
        if signature.target == Target::Cuda
            && let Ok(sizes) = sizes(&kernel)
        {
            let words = [workspace::flash_backward(&sizes)];
            writes.push(("workspace", calls.scratch(&words, DType::U32)));
        }
        calls.call(kernel, reads, writes)
    },
};

/// Forward and backward.
pub(super) const FLASH_KERNELS: [&str; 2] = ["flash_attention", "flash_attention_backward"];

const INPUTS: [(&str, Slot); 3] = [
    ("q", Slot::Input(0)),
    ("k", Slot::Input(1)),
    ("v", Slot::Input(2)),
];
const GRADIENTS: [(&str, Slot); 3] = [
    ("dq", Slot::Gradient(0)),
    ("dk", Slot::Gradient(1)),
    ("dv", Slot::Gradient(2)),
];

/// On a GPU, the scores of as many heads of k and v as naive attention has at once there, in half precision beside the
/// probabilities.
fn scores_at_once(signature: &Signature<'_>) -> Option<[usize; 3]> {
    let [q, k] = [0, 1].map(|i| matrices(signature.inputs[i].dims));
    let of_head = (q[0] / k[0].max(1)) * q[1] * k[1];
    let heads = workspace::naive_heads_at_once(k[0], of_head, signature.output.dtype);
    (signature.target == Target::Cuda).then_some([heads, of_head / k[1].max(1), k[1]])
}

/// What flash attention keeps: lse, and in half precision what rounding took from out.
fn kept(signature: &Signature<'_>) -> Vec<(&'static str, Slot)> {
    let names = ["lse", "rounding_error"].into_iter();
    let kept = (0..signature.kept.len()).map(Slot::Kept);
    names.zip(kept).collect()
}

/// (leading, length, width) of q, k or v; two dimensions are one head.
fn matrices(dims: &[usize]) -> [usize; 3] {
    match *dims {
        [ref leading @ .., length, width] => [leading.iter().product(), length, width],
        _ => [1, 1, 1], // refused by the op
    }
}

/// With what naive attention takes for itself in this pass on the CPU.
fn naive_taking(kernel: Kernel, signature: &Signature<'_>, pass: usize) -> Kernel {
    match sizes(&kernel) {
        Ok(sizes) => kernel.taking(naive_rooms(&sizes, signature.output.dtype)[pass]),
        Err(_) => kernel, // refused by the op
    }
}

/// With the sizes; `passes` times the two products of forward.
fn sized(kernel: Kernel, signature: &Signature<'_>, passes: f64) -> Kernel {
    let [q, k, v] = [0, 1, 2].map(|i| matrices(signature.inputs[i].dims));
    let batch = match signature.inputs[0].dims {
        [leading @ .., _, _, _] => leading.iter().product(),
        _ => 1,
    };
    let scores = (q[0] * q[1]) as f64 * k[1] as f64;
    let multiplied = scores * (q[2] + v[2]) as f64;
    let kernel = kernel.sized([
        ("batch", batch),
        ("matrices", q[0]),
        ("kv_matrices", k[0]),
        ("queries", q[1]),
        ("keys", k[1]),
        ("head_dim", q[2]),
        ("value_dim", v[2]),
    ]);
    kernel
        .with_all(signature.attributes)
        .costing(2.0 * passes * multiplied)
        .scoring(scores)
}

pub(super) fn sizes(k: &Kernel) -> Result<Sizes> {
    let batch = k.count("batch")?;
    Ok(Sizes {
        batch,
        heads: k.count("matrices")? / batch.max(1),
        kv_heads: k.count("kv_matrices")? / batch.max(1),
        queries: k.count("queries")?,
        keys: k.count("keys")?,
        head_dim: k.count("head_dim")?,
        value_dim: k.count("value_dim")?,
        mask: k.mask()?,
        scale: k.number("scale")?,
    })
}

/// The sizes of a planned call that is flash attention.
#[cfg(feature = "cuda")]
pub(crate) fn planned_flash_sizes(kernel: &Kernel) -> Option<Sizes> {
    let is_flash = FLASH_KERNELS.contains(&kernel.name());
    let in_model = |_| InModel::of(kernel).map(|sizes| sizes.flash());
    is_flash
        .then(|| sizes(kernel).or_else(in_model).ok())
        .flatten()
}

/// Whose heads and whose length.
#[derive(Clone, Copy)]
enum Side {
    Queries,
    Keys,
}

/// What is read as `name`, (B, heads, length, Dh).
fn heads<'a, T: Stored>(
    k: &Kernel,
    s: &Slices<'a>,
    name: &str,
    side: Side,
) -> Result<Heads<'a, T>> {
    let (matrices, length) = match side {
        Side::Queries => (k.count("matrices")?, k.count("queries")?),
        Side::Keys => (k.count("kv_matrices")?, k.count("keys")?),
    };
    let (batch, head_dim) = (k.count("batch")?, k.count("head_dim")?);
    let head = length * head_dim;
    let of_batch = matrices / batch.max(1) * head;
    Ok(Heads {
        data: s.x::<T>(name)?,
        strides: [of_batch, head, head_dim, 1],
    })
}
