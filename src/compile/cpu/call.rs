//! One call: its operands handed to its kernel.
//!
//! What a call has in half precision is all in one dtype, which is dispatched on here, once; what computes takes either
//! type and says by name which operands are f32 whatever happens.

use super::super::op::Op;
use super::super::plan::{Call, Plan};
use super::memory::View;
use super::operands::Operands;
use super::{Controls, attention, update};
use crate::Result;
use crate::kernels::cpu::gemm::{MatMut, MatRef, Threads, matmul_sum};
use crate::kernels::cpu::{
    Stored, attention::rotary_heads, cast, heads, rows::cross_entropy, rows::embedding,
    rows::residual_norm, swiglu,
};
use candle_core::DType;
use half::{bf16, f16};
use std::ops::ControlFlow;

/// Runs a call: whether the step goes on after it.
///
/// # Errors
/// Gradients that are not finite, found by clipping.
pub(super) fn run(
    plan: &Plan,
    call: &Call,
    view: &View<'_>,
    controls: &Controls<'_>,
) -> Result<ControlFlow<()>> {
    match &call.op {
        Op::Kernel(kernel) => kernel.run(&view.slices(call))?,
        op if update::has(op) => return update::run(plan, call, view, controls),
        _ => match plan.compute_dtype(call) {
            DType::BF16 => run_in(&Operands::<bf16>::new(call, view), controls),
            DType::F16 => run_in(&Operands::<f16>::new(call, view), controls),
            _ => run_in(&Operands::<f32>::new(call, view), controls),
        },
    }
    Ok(ControlFlow::Continue(()))
}

/// Runs a call whose lower dtype is `S`.
fn run_in<S: Stored<Wide = f32>>(o: &Operands<'_, S>, controls: &Controls<'_>) {
    let call = o.call;
    match call.op {
        Op::Cast { .. } => cast::cast(o.x("x"), o.lower_y("y")),
        Op::Embedding { width, .. } => {
            embedding::forward(o.x("table"), width, o.read("ids"), o.y("x"));
        }
        Op::RmsNorm { eps, .. } => {
            let (x, weight) = (o.x("x"), o.x("weight"));
            residual_norm::forward(x, weight, eps, o.lower_y("y"), o.y("rstd"));
        }
        Op::AddRmsNorm { eps, .. } => {
            let outputs = residual_norm::Outputs {
                sum: o.y("sum"),
                y: o.lower_y("y"),
                rstd: o.y("rstd"),
            };
            let (x, branch, weight) = (o.x("x"), o.lower_x("branch"), o.x("weight"));
            residual_norm::add_forward(x, branch, weight, eps, outputs);
        }
        Op::Matmul { .. } => product(o),
        Op::Rotate(sizes) => {
            rotary_heads::rotate_in_place(sizes.heads(), o.angles(), o.lower_y("x"));
        }
        Op::Attention(sizes) => attention::naive(o, &sizes),
        Op::AttentionBackward(sizes) => attention::naive_backward(o, &sizes),
        Op::RotateBack(_)
        | Op::NaiveAttention(_)
        | Op::NaiveAttentionBackward(_)
        | Op::PackedSwiGlu { .. }
        | Op::PackedSwiGluBackward { .. } => panic!("{:?} was planned for a GPU", call.op),
        Op::FlashAttention(sizes) => attention::flash_forward(o, &sizes),
        Op::FlashAttentionBackward(sizes) => attention::flash_backward(o, &sizes),
        Op::HeadAttention(sizes) => attention::heads_forward(o, &sizes),
        Op::HeadAttentionBackward(sizes) => attention::heads_backward(o, &sizes),
        Op::MergeHeads(sizes) => heads::merge(sizes.heads(), o.lower_x("x"), o.lower_y("y")),
        Op::MergeRotatedBack(sizes) => {
            let (x, y) = (o.lower_x("x"), o.lower_y("y"));
            rotary_heads::merge_rotated_back(sizes.heads(), o.angles(), x, y);
        }
        Op::SwiGlu { .. } => {
            swiglu::forward(o.lower_x("gate"), o.lower_x("up"), o.lower_y("y"));
        }
        Op::SwiGluBackward { .. } => {
            swiglu::backward_in_place(o.lower_y("dy"), o.lower_y("gate"), o.lower_y("up"));
        }
        Op::CrossEntropy {
            classes, counted, ..
        } => {
            let targets: &[u32] = o.read("targets");
            // What an eager step's backward begins with.
            let weight = (controls.loss_scale.unwrap_or(1.0) / counted as f64) as f32;
            let target = |row: usize| targets[row] as usize;
            let (logits, losses) = (o.lower_y("logits"), o.y("losses"));
            cross_entropy::forward_backward_in_place(logits, classes, target, weight, losses);
        }
        Op::RmsNormBackward {
            add_dx, accumulate, ..
        } => {
            let inputs = residual_norm::Inputs {
                x: o.x("x"),
                weight: o.x("weight"),
                rstd: o.x("rstd"),
            };
            let gradients = residual_norm::Gradients {
                dx: o.y("dx"),
                add_dx,
                dw: o.y("dweight"),
                add_dw: o.adds(accumulate),
            };
            residual_norm::backward(inputs, o.lower_y("dy"), gradients, o.y("partials"));
        }
        Op::EmbeddingBackward {
            width, accumulate, ..
        } => {
            let (dx, ids, dtable) = (o.x("dx"), o.read("ids"), o.y("dtable"));
            match o.adds(accumulate) {
                false => embedding::backward(dx, width, ids, dtable),
                true => embedding::backward_accumulating(dx, width, ids, dtable),
            }
        }
        _ => unreachable!("{} is not an op's", call.op.name()),
    }
}

/// `c = a b`, c in f32 or as a and b are.
fn product<S: Stored<Wide = f32>>(o: &Operands<'_, S>) {
    match o.dtype("c") {
        DType::F32 => product_into::<S, f32>(o),
        _ => product_into::<S, S>(o),
    }
}

fn product_into<S, C>(o: &Operands<'_, S>)
where
    S: Stored<Wide = f32>,
    C: Stored<Wide = f32>,
{
    let Op::Matmul {
        rows,
        cols,
        depth,
        a_transposed,
        b_transposed,
        accumulate,
    } = o.call.op
    else {
        return;
    };
    let a = match a_transposed {
        false => MatRef::new(o.lower_x("a"), rows, depth),
        true => MatRef::new(o.lower_x("a"), depth, rows).t(),
    };
    let b = match b_transposed {
        false => MatRef::new(o.lower_x("b"), depth, cols),
        true => MatRef::new(o.lower_x("b"), cols, depth).t(),
    };
    let c = MatMut::new(o.write::<C>("c"), rows, cols);
    matmul_sum(&[(a, b)], c, o.adds(accumulate), Threads::All);
}
