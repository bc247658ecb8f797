//! The linear maps of a program, those of one input together.

use super::super::form::Forms;
use super::super::program::Program;
use super::super::{Job, place_of};
use super::{Map, Maps, is_own};
use crate::graph::Node;

/// A map with a bias.
const BIASED: &str = "linear_bias";

fn parent_of(path: &str) -> String {
    path.rsplit_once('/')
        .map_or("", |(parent, _)| parent)
        .into()
}

/// The maps that are nodes of their own.
pub(in crate::compile::lower) fn find(
    program: &Program<'_>,
    job: &Job<'_>,
    packed: &[Vec<usize>],
    forms: &mut Forms,
) {
    let nodes = &program.nodes;
    let as_map = |i: usize| Map {
        path: place_of(&nodes[i]),
        input: 1,
        bias: (nodes[i].op == BIASED).then_some(2),
        output: nodes[i].output,
    };
    for i in 0..nodes.len() {
        let is_linear = |i: usize| ["linear", BIASED].contains(&nodes[i].op) && !nodes[i].composed;
        // What it reads but x is there before any node.
        let reads_weights = |node: &Node| {
            is_own(program, job, node, 1) && node.inputs[2..].iter().all(|x| program.is_leaf(x))
        };
        if !forms.is_free(i) || !is_linear(i) {
            continue;
        }
        let together = packed.iter().find(|group| group.contains(&i));
        let x = &nodes[i].inputs[0];
        let joins = |other: &usize| {
            let node = &nodes[*other];
            let is_packed = packed.iter().any(|group| group.contains(other));
            let is_alike = forms.is_free(*other) && is_linear(*other) && !is_packed;
            let same_x = || node.inputs[0].view == x.view && node.inputs[0].value == x.value;
            let flows_alike =
                || program.passes_through(node, 0) == program.passes_through(&nodes[i], 0);
            let near = || parent_of(&place_of(node)) == parent_of(&place_of(&nodes[i]));
            let is_same = || *other == i || reads_weights(node) && reads_weights(&nodes[i]);
            is_alike
                && is_same()
                && same_x()
                && flows_alike()
                && near()
                && program.are_in_one_segment(i, *other)
        };
        let readers = program.readers(x.value).iter().copied();
        let group: Vec<usize> = match together {
            Some(group) => group.clone(),
            None => readers.filter(joins).collect(),
        };
        let maps: Vec<(&Node, Map)> = group.iter().map(|i| (&nodes[*i], as_map(*i))).collect();
        let maps = Maps::new(program, job, &maps, together.is_some());
        forms.add(i, group, maps);
    }
}
