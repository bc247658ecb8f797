//! Tests of every op's entry in the table.

use super::{all, of};
use crate::attention::Mask;
use crate::attention::{self, AttentionConfig, KeyMask, ScoreBias};
use crate::graph::{Target, input, trace};
use crate::ops::cost::OpCost;
use crate::ops::info::OpInfo;
use crate::ops::lowering::{KernelCall, Signature};
use crate::ops::{self, WEIGHT_CAST};
use crate::precision::Autocast;
use candle_core::{DType, Tensor};
use std::collections::HashSet;

/// Applies every op, starting from x (2, 3, 8) in `dtype`.
fn of_every_op(dtype: DType) -> crate::Result<Tensor> {
    let meta = |name: &str, dims: &[usize]| input(name, dims, dtype);
    let x = meta("x", &[2, 3, 8])?;
    let table = |name: &str, dims: &[usize]| input(name, dims, DType::F32);
    let (weight, bias) = (table("weight", &[8])?, table("bias", &[8])?);
    let (w1, w3) = (meta("w1", &[8, 8])?, meta("w3", &[8, 8])?);
    let ids = input("ids", (2, 3), DType::U32)?;
    let row = meta("row", &[1, 8])?;
    let mut h = ops::embedding(&ids, &w1)?;
    h = ops::add(&ops::sub(&ops::mul(&h, &x)?, &row)?, &ops::div(&x, &row)?)?;
    h = ops::add_scaled(&h, &ops::div(&x, &h)?, 0.5)?;
    h = ops::add_scaled(&h, &ops::sub(&x, &h)?, 0.5)?;
    h = ops::cast(&h, dtype)?;
    h = ops::log(&ops::exp(&ops::rsqrt(&ops::pow(&h, 2.0)?)?)?)?;
    h = ops::clamp(
        &ops::affine(&ops::sqrt(&ops::abs(&h)?)?, 2.0, 1.0)?,
        0.0,
        9.0,
    )?;
    h = ops::relu(&ops::tanh(&ops::sigmoid(&ops::log_sigmoid(&ops::silu(
        &h,
    )?)?)?)?)?;
    let key = ops::DropoutKey::input("dropout")?;
    let probability = 0.1;
    h = ops::dropout(&h, &ops::Dropout { probability, key })?;
    h = ops::offset_rms_norm(&ops::soft_cap(&h, 30.0)?, &weight, 1e-5)?;
    h = ops::gelu(&ops::gelu(&h, ops::Gelu::Tanh)?, ops::Gelu::Erf)?;
    h = ops::rms_norm(&ops::layer_norm(&h, &weight, &bias, 1e-5)?, &weight, 1e-5)?;
    h = ops::linear(&ops::linear_bias(&h, &w1, &bias)?, &w3)?;
    h = ops::swiglu(&ops::swiglu_linear(&h, &w1, &w3)?, &h)?;
    let form = ops::Gelu::Tanh;
    h = ops::geglu(&ops::geglu_linear(&h, &w1, &w3, form)?, &h, form)?;
    let heads = ops::split_heads(&h, 4)?; // (2, 4, 3, 2)
    let angles = table("angles", &[3, 1])?;
    let heads = ops::rope(&ops::repeat_heads(&heads, 2)?, &angles, &angles)?;
    let config = AttentionConfig::default();
    let heads = attention::naive(&heads, &heads, &heads, &config)?;
    let heads = attention::flash(&heads, &heads, &heads, &config)?;
    let config = AttentionConfig {
        key_mask: Some(KeyMask::padding_input("key_mask", (2, 3))?),
        bias: Some(ScoreBias::new(&meta("terms", &[8, 3, 3])?)?),
        ..Default::default()
    };
    let heads = attention::naive(&heads, &heads, &heads, &config)?;
    let heads = attention::flash(&heads, &heads, &heads, &config)?;
    h = ops::merge_heads(&heads)?.narrow(2, 0, 8)?; // (2, 3, 8)
    let scores = ops::matmul_transposed(&h, &h)?;
    let p = ops::softmax(&scores, 1.0, Mask::Causal)?;
    h = ops::matmul(&p, &ops::contiguous(&h.transpose(0, 1)?.transpose(0, 1)?)?)?;
    h = ops::concat(&[&h, &ops::log_softmax(&h)?], 1)?.narrow(1, 0, 3)?;
    let h = ops::sub(&ops::max_keepdim(&h, 1)?, &ops::min_keepdim(&h, 2)?)?; // (2, 3, 8)
    let h = ops::contiguous(&h)?;
    let mut comparisons = [ops::eq, ops::ne, ops::lt, ops::le, ops::gt, ops::ge].into_iter();
    let h = comparisons.try_fold(h, |h, compare| {
        ops::where_cond(
            &compare(&h, &x)?,
            &ops::masked_fill(&h, &compare(&x, &h)?, 0.5)?,
            &x,
        )
    })?;
    let (largest, indices) = ops::topk(&h, 2)?; // (2, 3, 2)
    let h = ops::scatter_add(
        &h,
        2,
        &indices,
        &ops::gather(&largest, 2, &ids_of(&indices)?)?,
    )?;
    let rows = ops::index_select(&h, 1, &ops::argmax(&h, 1)?.narrow(0, 0, 1)?.flatten_all()?)?; // (2, 8, 8)
    let rows = ops::index_add(
        &rows,
        1,
        &ops::argmin(&rows, 1)?.narrow(0, 0, 1)?.flatten_all()?,
        &rows,
    )?;
    let h = ops::add(&h, &ops::one_hot(&ids, 8, dtype)?)?;
    let h = ops::add(&h, &rows.narrow(1, 0, 3)?)?;
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

/// Returns indices under 2, of the shape of these.
fn ids_of(indices: &Tensor) -> crate::Result<Tensor> {
    let x = input("of ids", [indices.dims(), &[2]].concat(), DType::F32)?;
    ops::argmax(&x, 3)
}

#[test]
fn gpus_have_kernels_for_every_op() {
    let mut seen = HashSet::new();
    for dtype in [DType::F32, DType::BF16] {
        let graph = trace(Target::Cuda, || of_every_op(dtype)).unwrap();
        for node in graph.nodes() {
            let info = of(node.op).unwrap();
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
    // On a GPU, naive attention with a key mask is composed of other ops than masked_softmax.
    let beside = [
        "copy",
        "checkpoint",
        "to_dtype",
        WEIGHT_CAST,
        "masked_softmax",
    ];
    for op in all().filter(|info| info.lowering.is_some()) {
        assert!(seen.contains(op.op) || beside.contains(&op.op), "{}", op.op);
    }
}

/// Except for entries that are not public ops: candle's own conversions, and checkpointing.
#[test]
fn what_can_be_planned_has_a_cost() {
    for info in all().filter(|info| info.lowering.is_some()) {
        let is_op = !["to_dtype", "copy", "checkpoint"].contains(&info.op);
        assert_eq!(info.cost.is_some(), is_op, "{}", info.op);
    }
}

#[test]
fn no_op_is_there_twice_and_costs_are_in_words() {
    let mut names = HashSet::new();
    for OpInfo { op, cost, .. } in all() {
        assert!(names.insert(op), "{op}");
        let has_words = |cost: OpCost| !cost.flops.is_empty() && !cost.bytes.is_empty();
        assert!(cost.is_none_or(has_words), "{op}");
    }
}

/// An op that autocast leaves alone is not part of a model, or chooses a dtype itself.
#[test]
fn what_is_cast_stands_on_a_list() {
    let uncast = [
        "cast",
        "checkpoint",
        "contiguous",
        "copy",
        "mask",
        "one_hot",
        "scale",
        "to_dtype",
        WEIGHT_CAST,
    ];
    let optimizers: HashSet<_> = [crate::optim::rules::INFOS, crate::optim::cost::INFOS]
        .concat()
        .iter()
        .map(|info| info.op)
        .collect();
    let policy = Autocast::cuda(DType::BF16);
    let cast: HashSet<_> = policy.classes().map(|(op, _)| op).collect();
    for OpInfo { op, .. } in all() {
        let is_cast = !uncast.contains(op) && !optimizers.contains(op);
        assert_eq!(cast.contains(op), is_cast, "{op}");
    }
}
