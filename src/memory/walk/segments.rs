//! Segments of the model that have a graph of their own: one op outside, whose backward makes the graph anew or lets go of
//! it.

use super::backward::Gradients;
use super::forward::alike;
use super::ledger::Key;
use super::{Node, Value, Walk};
use crate::memory::Holds;
use crate::nn::Checkpointing;
use std::num::NonZeroUsize;
use std::ops::Range;

/// One op, or as many as are alike, in the order of forward.
pub(super) struct Segment {
    input: Value,
    output: usize,
    graph: Graph,
    weights: Vec<Weight>,
    /// How many it stands for.
    count: f64,
}

enum Graph {
    /// Of so many blocks, made again in backward.
    Again(usize),
    Kept(Inside),
}

/// A graph inside.
struct Inside {
    input: Value,
    output: Value,
    tape: Vec<Node>,
    /// Its buffers.
    places: Range<usize>,
}

/// A weight that a segment reads, as often as one has blocks.
#[derive(Clone, Copy)]
struct Weight {
    value: Value,
    count: f64,
}

impl Walk {
    /// The model's blocks in segments.
    pub(super) fn segments(
        &mut self,
        mut x: Value,
        strategy: Checkpointing,
        layers: usize,
    ) -> Value {
        let again = strategy.recomputed_blocks(layers);
        let blocks = strategy.segment_blocks(layers).map_or(1, NonZeroUsize::get);
        let mut first = None;
        for count in alike(again / blocks) {
            x = self.checkpoint(x, blocks, count, &mut first);
        }
        for count in alike(layers - again) {
            x = self.release(x, count);
        }
        x
    }

    /// Blocks of which the input stays. Only a single segment's graph is walked; `first` is what was found in the first.
    fn checkpoint(
        &mut self,
        x: Value,
        blocks: usize,
        count: f64,
        first: &mut Option<(Vec<Weight>, Vec<Key>)>,
    ) -> Value {
        let (weights, casts) = match first {
            Some(first) if count > 1.0 => first.clone(),
            _ => {
                let region_had = self.casts.len();
                self.short_lived = true;
                let inside = self.inside(x, |walk, x| walk.blocks(x, blocks));
                self.short_lived = false;
                self.ledger.give_back_all(inside.places, &self.casts);
                let found = (weights(&inside.tape), self.casts[region_had..].to_vec());
                first.insert(found).clone()
            }
        };
        if count > 1.0 {
            let kept = casts.into_iter().filter_map(|key| self.ledger.get(key));
            for buffer in kept.collect::<Vec<_>>() {
                let count = count * buffer.count;
                let key = self.ledger.take(super::Buffer { count, ..buffer });
                self.casts.push(key);
            }
        }
        self.segment(x, Graph::Again(blocks), weights, count)
    }

    /// Blocks whose graph stays, each in one of its own.
    fn release(&mut self, x: Value, count: f64) -> Value {
        self.count = count;
        let inside = self.inside(x, Self::block);
        self.count = 1.0;
        let mut weights = weights(&inside.tape);
        for weight in &mut weights {
            weight.count /= count;
        }
        self.segment(x, Graph::Kept(inside), weights, count)
    }

    /// Runs `f` on a copy of x, with a tape of its own.
    fn inside(&mut self, x: Value, f: impl FnOnce(&mut Self, Value) -> Value) -> Inside {
        let start = self.ledger.mark();
        let outside = std::mem::take(&mut self.tape);
        let input = self.stays("inputs of segments", x);
        let output = f(self, input);
        Inside {
            input,
            output,
            tape: std::mem::replace(&mut self.tape, outside),
            places: start..self.ledger.mark(),
        }
    }

    /// The op itself, with its output.
    fn segment(&mut self, input: Value, graph: Graph, weights: Vec<Weight>, count: f64) -> Value {
        self.count = count;
        let output = self.stays("outputs of segments", input);
        self.count = 1.0;
        self.tape.push(Node::Segment(Box::new(Segment {
            input,
            output: output.id,
            graph,
            weights,
            count,
        })));
        output
    }

    /// A tensor like x that a graph holds.
    fn stays(&mut self, what: &'static str, x: Value) -> Value {
        let key = self.take_counted(true, Holds::Activations, what, x.size, x.width);
        self.value(what, x.size, x.width, Some(key))
    }

    pub(super) fn backward_of_segment(&mut self, segment: Segment, gradients: &mut Gradients) {
        self.count = 1.0;
        let incoming = gradients.remove(&segment.output);
        if segment.count > 1.0 {
            // From one end to the other: between them are the moments of both, and none that is worse.
            if let Graph::Kept(inside) = segment.graph {
                self.ledger.give_back_all(inside.places, &[]);
            }
            for Weight { value, count } in segment.weights {
                self.count = count * segment.count;
                self.take_counted(true, Holds::Gradients, value.what, value.size, value.width);
            }
            gradients.extend(incoming.map(|key| (segment.input.id, key)));
            return;
        }
        let inside = match segment.graph {
            Graph::Kept(inside) => inside,
            Graph::Again(blocks) => self.inside(segment.input, |walk, x| walk.blocks(x, blocks)),
        };
        let mut found = Gradients::new();
        self.count = 1.0;
        self.add_to(&inside.output, &mut found);
        self.backward_through(inside.tape, &mut found);
        self.count = 1.0;
        self.ledger.give_back_all(inside.places, &[]);
        if let Some(key) = incoming {
            self.ledger.give_back(key);
        }
        // Outside all of them are added to zeros once more, one after another.
        for Weight { value, .. } in segment.weights {
            let once = Value {
                is_weight: false,
                ..value
            };
            let mut sums = Gradients::new();
            self.add_to(&once, &mut sums);
            sums.into_values()
                .for_each(|key| self.ledger.give_back(key));
        }
        self.add_to(&segment.input, gradients);
        if let Some(key) = found.remove(&inside.input.id) {
            self.ledger.give_back(key);
        }
    }
}

/// The weights that a graph reads.
fn weights(tape: &[Node]) -> Vec<Weight> {
    let mut weights = Vec::new();
    for node in tape {
        if let Node::Op(entry) = node {
            let read = entry.inputs.iter().filter(|input| input.is_weight);
            weights.extend(read.map(|value| Weight {
                value: *value,
                count: entry.count,
            }));
        }
    }
    weights
}
