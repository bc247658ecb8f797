//! Segments of a graph, which backward recomputes.

use crate::graph::{Graph, Node, TraceEvent, ValueId, ValueRef};
use std::ops::Range;

/// A function that backward recomputes, where a gradient reaches what it returns.
pub(super) struct Segment {
    /// Its events, but the drops at its end with which its graph goes.
    pub inside: Range<usize>,
    /// The node that stands for it outside.
    pub end: usize,
    /// The copies of its inputs that it works on,
    pub copies: Vec<ValueId>,
    /// and what they are copies of.
    pub inputs: Vec<ValueRef>,
    /// The last that is made inside.
    pub output: ValueId,
}

pub(super) fn node(graph: &Graph, event: usize) -> Option<&Node> {
    match graph.events.get(event) {
        Some(TraceEvent::Node(node)) => Some(node),
        _ => None,
    }
}

/// The segments of a graph, in the order of their ends.
pub(super) fn segments(graph: &Graph) -> Vec<Segment> {
    let is_drop = |event: &TraceEvent| matches!(event, TraceEvent::Drop(_));
    let mut open = Vec::new();
    let mut found = Vec::new();
    for (i, event) in graph.events.iter().enumerate() {
        match event {
            TraceEvent::Enter => open.push(i + 1),
            TraceEvent::Leave => {
                let Some(begin) = open.pop() else {
                    continue;
                };
                // Without a gradient there is no node, and no graph.
                let mut after = graph.events.iter().enumerate().skip(i + 1);
                let Some((end, TraceEvent::Node(last))) = after.find(|(_, event)| !is_drop(event))
                else {
                    continue;
                };
                if !last.ends_segment() {
                    continue;
                }
                let drops = graph.events[begin..i].iter().rev();
                let inside = begin..i - drops.take_while(|event| is_drop(event)).count();
                let copies = inside.clone().filter(|i| !is_drop(&graph.events[*i]));
                let copies = copies.map_while(|i| node(graph, i).filter(|node| node.is_leaf()));
                let copies: Vec<&Node> = copies.collect();
                found.push(Segment {
                    end,
                    inputs: copies.iter().map(|copy| copy.inputs[0].clone()).collect(),
                    copies: copies.iter().map(|copy| copy.output).collect(),
                    output: last.inputs[0].value,
                    inside,
                });
            }
            _ => {}
        }
    }
    found
}
