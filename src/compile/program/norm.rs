//! Fuses RMSNorm and LayerNorm in f32 with the residual addition before them and the cast after them.

use super::{Kind, Node, Program, Replacement};
use crate::graph::{Attribute, ValueId, ValueRef};
use crate::kernels::Norm;
use crate::ops::norm::ResidualNorm;
use crate::ops::{arithmetic, cast, layer_norm, rms_norm};
use candle_core::DType;

pub(super) fn rewrite(program: &mut Program) {
    let mut replacements: Vec<Replacement> = Vec::new();
    for i in 0..program.nodes.len() {
        if let Some(norm) = norm_of(program, i) {
            let is_free = |node: usize| !replacements.iter().any(|r| r.nodes.contains(&node));
            replacements.push(around(program, i, norm, is_free));
        }
    }
    program.replace(replacements);
}

/// Returns the norm that a node is, if it is one in f32, and its eps.
fn norm_of(program: &Program, i: usize) -> Option<(Norm, f64)> {
    let node = &program.nodes[i];
    let Some(Attribute::Number(eps)) = node.attribute("eps") else {
        return None;
    };
    let norms = [
        (Norm::Rms, &rms_norm::INFO),
        (Norm::OffsetRms, &rms_norm::OFFSET_INFO),
        (Norm::Layer, &layer_norm::INFO),
    ];
    let mut norms = norms.into_iter();
    let (norm, _) = norms.find(|(_, info)| program.is_kernel(i, info))?;
    let (x, affine) = (&node.inputs[0], &node.inputs[1..]);
    let is_f32 = |operand: &ValueRef| program.value(operand.value).dtype == DType::F32;
    let is_empty = program.shape_of(x).contains(&0);
    // Its backward always writes the gradient of x, so x must not be a weight, nor detached if it needs a gradient.
    let flows = node.needs_grad[0] && program.maker(x.value).is_some();
    let leaves_gradient = flows || !program.needs_grad(x.value) || !program.needs_grad(node.output);
    let fits = is_f32(x) && x.view.is_none() && !is_empty && leaves_gradient;
    let are_weights = affine
        .iter()
        .all(|weight| is_f32(weight) && program.is_leaf(weight));
    (fits && are_weights && node.saved.len() == 1).then_some((norm, eps))
}

/// Returns the fused node of the norm at `i`.
fn around(
    program: &Program,
    i: usize,
    (norm, eps): (Norm, f64),
    is_free: impl Fn(usize) -> bool,
) -> Replacement {
    let node = &program.nodes[i];
    let (mut nodes, mut by) = (vec![i], node.clone());
    if let Some((cast, y)) = rounded(program, i) {
        nodes.push(cast);
        by.output = y;
    }
    let sum = sum_of(program, i, by.output, is_free);
    by.kind = Kind::Norm(ResidualNorm {
        norm,
        eps,
        adds: sum.is_some(),
        sum_stays: true,
    });
    if let Some(sum) = sum {
        by.second = Some(node.inputs[0].value);
        by.inputs.splice(..1, sum.operands);
        by.needs_grad.splice(..1, sum.needs_grad);
        nodes.extend(sum.nodes);
    }
    nodes.sort_unstable();
    let by = by.replacing(nodes.iter().map(|node| &program.nodes[*node]));
    Replacement { nodes, at: i, by }
}

/// Returns the cast of a norm's output to half precision and its output, if nothing else reads the norm's output.
fn rounded(program: &Program, i: usize) -> Option<(usize, ValueId)> {
    let at = program.only_reader(program.nodes[i].output)?;
    let node = &program.nodes[at];
    let dtype = program.value(node.output).dtype;
    let fits = is_cast(program, at)
        && matches!(dtype, DType::BF16 | DType::F16)
        && program.are_in_one_segment(i, at);
    fits.then_some((at, node.output))
}

/// Returns whether a node casts all of a value.
fn is_cast(program: &Program, i: usize) -> bool {
    let node: &Node = &program.nodes[i];
    program.is(i, &cast::CAST) && node.inputs[0].view.is_none()
}

/// The addition before a norm.
struct Sum {
    /// The residual stream and the branch.
    operands: [ValueRef; 2],
    needs_grad: [bool; 2],
    /// The indices of its nodes.
    nodes: Vec<usize>,
}

/// Returns the addition before the norm at `i`, if the norm is the first to read the sum.
fn sum_of(program: &Program, i: usize, y: ValueId, is_free: impl Fn(usize) -> bool) -> Option<Sum> {
    let x = program.nodes[i].inputs[0].value;
    let at = program.maker(x)?;
    let add = &program.nodes[at];
    let is_first = program.readers(x).first() == Some(&i) && !program.is_output(x);
    let whole = |operand: &ValueRef| {
        operand.view.is_none() && program.value(operand.value).shape == program.value(x).shape
    };
    if !program.is(at, &arithmetic::ADD_INFO)
        || !is_free(at)
        || !is_first
        || !add.inputs.iter().all(whole)
    {
        return None;
    }
    let [stream, mut branch] = [add.inputs[0].clone(), add.inputs[1].clone()];
    let [of_stream, mut of_branch] = [add.needs_grad[0], add.needs_grad[1]];
    let (dtype, mut nodes) = (program.value(y).dtype, vec![at]);
    // Under autocast the branch is cast to f32 only for the sum.
    let widened = program.maker(branch.value).filter(|cast| {
        is_cast(program, *cast)
            && whole(&program.nodes[*cast].inputs[0])
            && is_free(*cast)
            && program.only_reader(branch.value) == Some(at)
    });
    if let Some(cast) = widened.filter(|_| dtype != DType::F32) {
        branch = program.nodes[cast].inputs[0].clone();
        of_branch = of_branch && program.nodes[cast].needs_grad[0];
        nodes.push(cast);
    }
    let fits = program.value(stream.value).dtype == DType::F32
        && program.value(branch.value).dtype == dtype;
    fits.then_some(Sum {
        operands: [stream, branch],
        needs_grad: [of_stream, of_branch],
        nodes,
    })
}
