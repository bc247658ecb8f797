//! Reorders linear layers with the same input: next to each other, the last one first. Backward then visits them in the
//! order of the model, and each adds to the gradient of the input in place.

use super::Program;
use crate::ops::{linear, linear_bias};

pub(super) fn rewrite(program: &mut Program) {
    let count = program.nodes.len();
    let (mut order, mut is_placed) = (Vec::with_capacity(count), vec![false; count]);
    for i in 0..count {
        if is_placed[i] {
            continue;
        }
        let mut group = vec![i];
        if is_map_of_weights(program, i) {
            let x = program.nodes[i].inputs[0].value;
            let readers = program.readers(x).iter().copied();
            group.extend(readers.filter(|other| *other > i && are_siblings(program, i, *other)));
        }
        for node in group.into_iter().rev() {
            is_placed[node] = true;
            order.push(node);
        }
    }
    let mut nodes: Vec<_> = std::mem::take(&mut program.nodes)
        .into_iter()
        .map(Some)
        .collect();
    let in_order = order.into_iter().filter_map(|node| nodes[node].take());
    program.nodes = in_order.collect();
}

/// Returns whether a node is a linear layer whose other inputs are weights.
fn is_map_of_weights(program: &Program, i: usize) -> bool {
    let node = &program.nodes[i];
    let is_linear = [linear::INFO, linear_bias::INFO]
        .iter()
        .any(|info| program.is_kernel(i, info));
    let copies = || {
        node.extra_inputs
            .iter()
            .all(|read| program.copied(read.value).is_some())
    };
    let weights = || node.inputs[1..].iter().all(|x| program.is_leaf(x));
    is_linear && copies() && weights() && program.has_parameter_gradient(&node.inputs[1])
}

fn are_siblings(program: &Program, first: usize, other: usize) -> bool {
    let [a, b] = [first, other].map(|node| &program.nodes[node]);
    let parent = |path: &str| path.rsplit_once('/').map(|(parent, _)| parent.to_string());
    is_map_of_weights(program, other)
        && a.inputs[0].value == b.inputs[0].value
        && a.inputs[0].view == b.inputs[0].view
        && a.needs_grad[0] == b.needs_grad[0]
        && parent(&a.path) == parent(&b.path)
        && program.are_in_one_segment(first, other)
}
