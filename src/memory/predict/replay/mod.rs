//! A traced function, replayed without computing anything: every buffer is taken and given back where the eager run
//! takes it and gives it back, and what was alive at the worst moment is the breakdown.
//!
//! What lives here: forward as the graph has it, op by op (`forward`), backward as [`backward`](crate::backward()) runs
//! it (`backward`, `gradients`), segments that are recomputed (`segments`), f16 gradients that are unscaled
//! (`unscale`), the bytes (`ledger`). What does not: what an op takes, which its own file says
//! ([`MemoryStep`](crate::graph::MemoryStep)); what is made of it ([`estimate_graph`](super::estimate_graph())).
//!
//! No model is known here. Stretches of a graph may stand for many that are alike, one after another ([`Repeat`]): what
//! lasts longer than all of them counts for each. No moment of a stretch that stands for several is worse than the same
//! one of the stretch before them or after them, since each adds as much as the next.

mod backward;
mod forward;
mod gradients;
mod ledger;
mod segments;
mod unscale;

pub(super) use ledger::{Buffer, Formula, What};

use super::{MemoryKind, Mode};
use crate::graph::{Graph, Node, Room, Source, TraceEvent, ValueId, ValueRef};
use gradients::{Gradient, Gradients};
use ledger::{Key, Ledger};
use segments::Segment;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// What came of it.
pub(super) struct Outcome {
    /// The most that was alive at once. In f64: exact to 2^53, and no overflow beyond.
    pub peak_bytes: f64,
    /// What was alive then.
    pub at_peak: Vec<Buffer>,
    /// What was alive when forward was done,
    pub after_forward: Vec<Buffer>,
    /// and its bytes.
    pub after_forward_bytes: f64,
}

/// A stretch of events that stands for `count` like it, one after another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Repeat {
    pub stretch: Range<usize>,
    pub count: f64,
    /// Where all that are alike have ended: what is dropped before is dropped by each of them, or by the next.
    pub until: usize,
}

/// Replays `graph` as far as `mode` goes, with `residents` there from the beginning.
pub(super) fn replay(
    graph: &Graph,
    mode: Mode,
    residents: impl IntoIterator<Item = Buffer>,
    repeats: &[Repeat],
) -> Outcome {
    let mut replay = Replay::new(graph, repeats);
    for resident in residents {
        replay.ledger.take(resident);
    }
    let place = replay.ledger.mark();
    replay.forward();
    let after_forward_bytes = replay.ledger.alive_bytes();
    let after_forward = replay.ledger.alive_from(0).into_iter();
    let after_forward = after_forward.map(|(_, buffer)| buffer).collect();
    if mode.has_backward()
        && let Some(output) = graph.outputs.first()
    {
        let mut gradients = Gradients::default();
        // That of a scalar is less than a tensor's record.
        let count = f64::from(elements(graph.shape_of(output)) > 1.0);
        let key = replay.take(MemoryKind::Scratch, "the output's gradient", output, count);
        gradients.insert(output.value, Gradient { key, is_own: false });
        replay.backward(output.value, &mut gradients);
    }
    if mode == Mode::TrainStep {
        replay.unscale(place);
    }
    let (peak_bytes, at_peak) = replay.ledger.into_worst();
    Outcome {
        peak_bytes,
        at_peak,
        after_forward,
        after_forward_bytes,
    }
}

struct Replay<'a> {
    graph: &'a Graph,
    repeats: &'a [Repeat],
    ledger: Ledger,
    /// Which event makes each value.
    makers: Vec<Option<usize>>,
    /// At which event each value goes, its node with it.
    gone: Vec<usize>,
    /// What outlives the op that keeps it: somebody reads it.
    is_read: Vec<bool>,
    /// In the order of their ends.
    segments: Vec<Segment>,
    /// Each value's buffer, while there is one.
    rooms: Vec<Option<Key>>,
    /// What the node that is this event holds beside tensors.
    held: HashMap<usize, Vec<Key>>,
    /// Backward: the nodes that are still to come, as events,
    waiting: HashSet<usize>,
    /// and how many of them hold each value.
    holders: Vec<usize>,
    /// Backward: how many tensors more than one there are on a buffer.
    sharing: HashMap<Key, usize>,
}

impl<'a> Replay<'a> {
    fn new(graph: &'a Graph, repeats: &'a [Repeat]) -> Self {
        let values = graph.values.len();
        let mut gone = vec![usize::MAX; values];
        let mut is_read = vec![false; values];
        for operand in &graph.outputs {
            is_read[operand.value.0] = true;
        }
        for (i, event) in graph.events.iter().enumerate() {
            match event {
                TraceEvent::Drop(value) => gone[value.0] = i,
                TraceEvent::Node(node) => {
                    for operand in node.inputs.iter().chain(&node.reads) {
                        is_read[operand.value.0] = true;
                    }
                }
                _ => {}
            }
        }
        let makers = graph.makers();
        let segments = segments::found(graph, &makers);
        for segment in &segments {
            for value in segment.retained() {
                let gone = &mut gone[value.0];
                *gone = match value == segment.output {
                    true => segment.inside.end,             // it is copied then
                    false => segment.inside.end.max(*gone), // a region may keep a weight's copy for longer
                };
            }
        }
        Self {
            graph,
            repeats,
            ledger: Ledger::default(),
            makers,
            gone,
            is_read,
            segments,
            rooms: vec![None; values],
            held: HashMap::new(),
            waiting: HashSet::new(),
            holders: vec![0; values],
            sharing: HashMap::new(),
        }
    }

    /// The node that is this event.
    fn node(&self, event: usize) -> Option<&'a Node> {
        node(self.graph, event)
    }

    /// How many of what an event makes are alive at once, if each goes at the event `gone`.
    fn count(&self, event: usize, gone: usize) -> f64 {
        let repeats = self.repeats.iter();
        let lasting = repeats.filter(|r| r.stretch.contains(&event) && gone >= r.until);
        lasting.map(|repeat| repeat.count).product()
    }

    fn take(&mut self, kind: MemoryKind, what: &'static str, like: &ValueRef, count: f64) -> Key {
        let value = self.graph.value(like.value);
        self.ledger.take(Buffer {
            kind,
            what: What::Named(what),
            formula: match like.view {
                None => Formula::Of(like.value),
                Some(_) => Formula::Letters("of a view"),
            },
            elements: elements(self.graph.shape_of(like)),
            width: value.dtype.size_in_bytes(),
            count,
        })
    }

    /// As [`take`](Self::take), in f32.
    fn take_wide(&mut self, like: &ValueRef) -> Key {
        self.ledger.take(Buffer {
            kind: MemoryKind::Scratch,
            what: What::Named("sums in f32"),
            formula: Formula::Of(like.value),
            elements: elements(self.graph.shape_of(like)),
            width: 4,
            count: 1.0,
        })
    }

    fn take_room(&mut self, kind: MemoryKind, room: Room, count: f64) -> Key {
        self.ledger.take(Buffer {
            kind,
            what: What::Named(room.what),
            formula: Formula::Letters(room.formula),
            elements: room.elements,
            width: room.element_bytes,
            count,
        })
    }

    /// Takes room and gives it back.
    fn pass(&mut self, room: Room) {
        let key = self.take_room(MemoryKind::Scratch, room, 1.0);
        self.ledger.give_back(key);
    }

    /// Gives back a value's buffer, if there is one.
    fn free(&mut self, value: ValueId) {
        if let Some(key) = self.rooms[value.0].take() {
            self.ledger.give_back(key);
        }
    }

    fn is_weight(&self, value: ValueId) -> bool {
        matches!(self.graph.value(value).source, Source::Weight(_))
    }
}

fn node(graph: &Graph, event: usize) -> Option<&Node> {
    match graph.events.get(event) {
        Some(TraceEvent::Node(node)) => Some(node),
        _ => None,
    }
}

/// In f64: no overflow.
pub(super) fn elements(shape: &[usize]) -> f64 {
    shape.iter().map(|dim| *dim as f64).product()
}
