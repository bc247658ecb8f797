//! What every op lowers to.

use super::{KernelCall, Signature};
use crate::attention::Mask;
use crate::attention::{self, AttentionConfig};
use crate::graph::{Target, input, trace};
use crate::ops::{self, WEIGHT_CAST, info};
use candle_core::{DType, Tensor};
use std::collections::HashSet;

/// Something of every op, from x (2, 3, 8) in this dtype.
fn of_every_op(dtype: DType) -> crate::Result<Tensor> {
    let hollow = |name: &str, dims: &[usize]| input(name, dims, dtype);
    let x = hollow("x", &[2, 3, 8])?;
    let table = |name: &str, dims: &[usize]| input(name, dims, DType::F32);
    let (weight, bias) = (table("weight", &[8])?, table("bias", &[8])?);
    let (w1, w3) = (hollow("w1", &[8, 8])?, hollow("w3", &[8, 8])?);
    let ids = input("ids", (2, 3), DType::U32)?;
    let row = hollow("row", &[1, 8])?;
    let mut h = ops::embedding(&ids, &w1)?;
    h = ops::add(&ops::sub(&ops::mul(&h, &x)?, &row)?, &ops::div(&x, &row)?)?;
    h = ops::add_scaled(&h, &ops::div(&x, &h)?, 0.5)?;
    h = ops::add_scaled(&h, &ops::sub(&x, &h)?, 0.5)?;
    h = ops::cast(&h, dtype)?;
    h = ops::log(&ops::exp(&ops::rsqrt(&ops::pow(&h, 2.0)?)?)?)?;
    h = ops::relu(&ops::tanh(&ops::sigmoid(&ops::silu(&h)?)?)?)?;
    h = ops::gelu(&ops::gelu(&h, ops::Gelu::Tanh)?, ops::Gelu::Erf)?;
    h = ops::rms_norm(&ops::layer_norm(&h, &weight, &bias, 1e-5)?, &weight, 1e-5)?;
    h = ops::linear(&ops::linear_bias(&h, &w1, &bias)?, &w3)?;
    h = ops::swiglu(&ops::swiglu_linear(&h, &w1, &w3)?, &h)?;
    let heads = ops::split_heads(&h, 4)?; // (2, 4, 3, 2)
    let angles = table("angles", &[3, 1])?;
    let heads = ops::rope(&ops::repeat_heads(&heads, 2)?, &angles, &angles)?;
    let config = AttentionConfig::default();
    let heads = attention::naive(&heads, &heads, &heads, &config)?;
    let heads = attention::flash(&heads, &heads, &heads, &config)?;
    h = ops::merge_heads(&heads)?.narrow(2, 0, 8)?; // (2, 3, 8)
    let scores = ops::matmul_transposed(&h, &h)?;
    let p = ops::softmax(&scores, 1.0, Mask::Causal)?;
    h = ops::matmul(&p, &ops::contiguous(&h.transpose(0, 1)?.transpose(0, 1)?)?)?;
    h = ops::concat(&[&h, &ops::log_softmax(&h)?], 1)?.narrow(1, 0, 3)?;
    let h = ops::contiguous(&h)?;
    let losses = [
        ops::linear_cross_entropy(&h, &w1, &ids)?,
        ops::cross_entropy(&h, &ids)?,
        ops::cross_entropy_ignoring(&h, &ids, 1)?,
        ops::cast(&ops::sum(&h)?, DType::F32)?,
        ops::cast(&ops::mean(&h)?, DType::F32)?,
    ];
    let half = ops::cast(&losses[0], DType::BF16)?;
    let mut losses = losses.into_iter();
    losses.try_fold(half, |sum, loss| ops::add(&sum, &loss))
}

#[test]
fn gpus_have_kernels_for_every_op() {
    let mut seen = HashSet::new();
    for dtype in [DType::F32, DType::BF16] {
        let graph = trace(Target::Cuda, || of_every_op(dtype)).unwrap();
        for node in graph.nodes() {
            let info = info::of(node.op).unwrap();
            assert!(!node.composed || info.lowers_composed, "{}", node.op);
            let lowering = info.lowering.unwrap();
            seen.insert(node.op);
            let signature = Signature::of(&graph, node);
            for calls in [lowering.forward, lowering.backward].map(|half| half(&signature)) {
                for KernelCall { kernel, .. } in &calls.calls {
                    assert!(kernel.is_on_gpu(), "{}: {}", node.op, kernel.name());
                }
            }
        }
    }
    let beside = ["copy", "checkpoint", "to_dtype", WEIGHT_CAST];
    for op in info::all().filter(|info| info.lowering.is_some()) {
        assert!(seen.contains(op.op) || beside.contains(&op.op), "{}", op.op);
    }
}
