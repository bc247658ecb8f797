//! Rewrites RMSNorm and LayerNorm in f32: with the addition before it, as the norms of a residual stream have one, and
//! with the cast after it.

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

/// A norm of f32, and its eps.
fn norm_of(program: &Program, i: usize) -> Option<(Norm, f64)> {
    let node = &program.nodes[i];
    let Some(Attribute::Number(eps)) = node.attribute("eps") else {
        return None;
    };
    let norms = [
        (Norm::Rms, &rms_norm::INFO),
        (Norm::Layer, &layer_norm::INFO),
    ];
    let mut norms = norms.into_iter();
    let (norm, _) = norms.find(|(_, info)| program.is_kernel(i, info))?;
    let (x, affine) = (&node.inputs[0], &node.inputs[1..]);
    let is_f32 = |operand: &ValueRef| program.value(operand.value).dtype == DType::F32;
    let is_empty = program.shape_of(x).contains(&0);
    // Its backward leaves a gradient of x: one that flows, and not into a weight.
    let flows = node.passes[0] && program.maker(x.value).is_some();
    let leaves_gradient = flows || !program.is_wanted(x.value) || !program.is_wanted(node.output);
    let fits = is_f32(x) && x.view.is_none() && !is_empty && leaves_gradient;
    let are_weights = affine
        .iter()
        .all(|weight| is_f32(weight) && program.is_leaf(weight));
    (fits && are_weights && node.kept.len() == 1).then_some((norm, eps))
}

/// The norm at `i` with what it takes in.
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
    let is_half = program.value(by.output).dtype != DType::F32;
    by.kind = Kind::Norm(ResidualNorm {
        norm,
        eps,
        adds: sum.is_some(),
        sum_stays: true,
        branch_is_wanted: is_half && sum.as_ref().is_some_and(|sum| sum.passes[1]),
    });
    if let Some(sum) = sum {
        by.second = Some(node.inputs[0].value);
        by.inputs.splice(..1, sum.operands);
        by.passes.splice(..1, sum.passes);
        nodes.extend(sum.nodes);
    }
    nodes.sort_unstable();
    let by = by.standing_for(nodes.iter().map(|node| &program.nodes[*node]));
    Replacement { nodes, at: i, by }
}

/// The cast of what the norm at `i` gives to half precision, if nothing else reads that; and what it makes.
fn rounded(program: &Program, i: usize) -> Option<(usize, ValueId)> {
    let at = program.only_reader(program.nodes[i].output)?;
    let node = &program.nodes[at];
    let dtype = program.value(node.output).dtype;
    let fits = is_cast(program, at)
        && matches!(dtype, DType::BF16 | DType::F16)
        && program.are_in_one_segment(i, at);
    fits.then_some((at, node.output))
}

/// Whether a node casts all of a value.
fn is_cast(program: &Program, i: usize) -> bool {
    let node: &Node = &program.nodes[i];
    program.is(i, &cast::CAST) && node.inputs[0].view.is_none()
}

/// What is normed, as a sum.
struct Sum {
    /// Stream and branch.
    operands: [ValueRef; 2],
    passes: [bool; 2],
    /// What makes it.
    nodes: Vec<usize>,
}

/// What is normed at `i`, if it is a sum that the norm reads before all others.
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
    let [of_stream, mut of_branch] = [add.passes[0], add.passes[1]];
    let (dtype, mut nodes) = (program.value(y).dtype, vec![at]);
    // Under autocast the branch is widened for the sum alone.
    let widened = program.maker(branch.value).filter(|cast| {
        is_cast(program, *cast)
            && whole(&program.nodes[*cast].inputs[0])
            && is_free(*cast)
            && program.only_reader(branch.value) == Some(at)
    });
    if let Some(cast) = widened.filter(|_| dtype != DType::F32) {
        branch = program.nodes[cast].inputs[0].clone();
        of_branch = of_branch && program.nodes[cast].passes[0];
        nodes.push(cast);
    }
    let fits = program.value(stream.value).dtype == DType::F32
        && program.value(branch.value).dtype == dtype;
    fits.then_some(Sum {
        operands: [stream, branch],
        passes: [of_stream, of_branch],
        nodes,
    })
}
