//! Turns events into blocks: each with its circumstances, lifetime and use.

use super::buffer::{Event, EventKind};
use super::{Label, MemoryKind};
use crate::model::HEAD;
use crate::ops::{self, WEIGHT_CAST};
use crate::probe::Path;
use std::collections::HashMap;

/// A block of memory that was alive during the recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Its address.
    pub address: usize,
    /// Its size.
    pub bytes: u64,
    /// Its use.
    pub kind: MemoryKind,
    /// The name that [`Recorder::label`](crate::memory::Recorder::label) gave it, if any.
    pub name: Option<String>,
    /// The path at its allocation: an op's path, or the range around candle's own work; the root if it was allocated
    /// before the recording.
    pub path: Path,
    /// The phase at its allocation; empty if none.
    pub phase: &'static str,
    /// Number of the thread that allocated it, from 1 in the order of their first event; 0 if it was allocated before
    /// the recording.
    pub thread: u32,
    /// The event of its allocation; `None` if it was allocated before the recording.
    pub allocated_at: Option<usize>,
    /// The event at which it was freed; `None` if it was alive at the end.
    pub freed_at: Option<usize>,
}

impl Block {
    /// Returns whether it was alive just after this event.
    pub fn is_alive_at(&self, event: usize) -> bool {
        self.allocated_at.is_none_or(|allocated| allocated <= event)
            && self.freed_at.is_none_or(|freed| event < freed)
    }
}

/// A phase, from its first event to its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSpan {
    /// `forward`, `backward`, `optimizer`, or a caller's name.
    pub name: &'static str,
    /// The event at which it began.
    pub begins_at: usize,
    /// The event at which it ended; the recording's last event if it did not end.
    pub ends_at: usize,
}

/// Facts that determine a block's [`MemoryKind`], in addition to the block itself.
#[derive(Clone, Copy, Default)]
struct Circumstances {
    phase: Option<usize>,
    call: Option<usize>,
    freed_in: Option<usize>,
}

struct Open {
    thread: u32,
    /// Index among all ops, or among all phases.
    number: usize,
    path: Path,
    phase: &'static str,
}

#[derive(Default)]
struct OpenRanges {
    ops: Vec<Open>,
    phases: Vec<Open>,
    calls: usize,
}

impl OpenRanges {
    /// Returns the op, path and phase that an event belongs to: the thread's own, or for a thread in no range the
    /// latest.
    fn owner(&self, event: &Event) -> (Option<usize>, Path, &'static str, Option<usize>) {
        let is_nowhere = event.path == Path::ROOT && event.phase.is_empty();
        let of = |open: &&Open| is_nowhere || open.thread == event.thread;
        let op = self.ops.iter().rev().find(of);
        let phase = self.phases.iter().rev().find(of).map(|open| open.number);
        match op {
            Some(op) if is_nowhere => {
                let mut phases = self.phases.iter().rev();
                let phase = phases.find(|open| open.thread == op.thread);
                let phase = phase.map(|open| open.number);
                (Some(op.number), op.path, op.phase, phase)
            }
            // Not a worker of an op: no known op, but the phase that runs.
            None if is_nowhere => {
                let name = self.phases.last().map_or("", |open| open.phase);
                (None, Path::ROOT, name, phase)
            }
            op => (op.map(|op| op.number), event.path, event.phase, phase),
        }
    }
}

fn close(open: &mut Vec<Open>, event: &Event) -> Option<Open> {
    let is_it = |open: &Open| open.thread == event.thread && open.path == event.path;
    let place = open.iter().rposition(is_it)?;
    Some(open.remove(place))
}

/// Returns the blocks in the order of allocation, and the phases.
pub(super) fn of(events: &[Event], labels: Vec<Label>) -> (Vec<Block>, Vec<PhaseSpan>) {
    let mut open_ranges = OpenRanges::default();
    let mut phases: Vec<PhaseSpan> = Vec::new();
    let mut blocks: Vec<(Block, Circumstances)> = Vec::new();
    let mut alive: HashMap<usize, usize> = HashMap::new();
    let mut labels = labels.into_iter().peekable();
    let last = events.len().saturating_sub(1);
    for position in 0..=events.len() {
        while let Some(label) = labels.next_if(|label| label.position <= position) {
            let place = *alive.entry(label.address).or_insert_with(|| {
                blocks.push(before(label.address, label.bytes));
                blocks.len() - 1
            });
            let block = &mut blocks[place].0;
            (block.kind, block.name) = (label.kind, Some(label.name));
        }
        let Some(event) = events.get(position) else {
            break;
        };
        let open = |number| Open {
            thread: event.thread,
            number,
            path: event.path,
            phase: event.phase,
        };
        match event.kind {
            EventKind::Begins => {}
            EventKind::OpBegins => {
                open_ranges.ops.push(open(open_ranges.calls));
                open_ranges.calls += 1;
            }
            EventKind::OpEnds => drop(close(&mut open_ranges.ops, event)),
            EventKind::PhaseBegins => {
                open_ranges.phases.push(open(phases.len()));
                phases.push(PhaseSpan {
                    name: event.phase,
                    begins_at: position,
                    ends_at: last,
                });
            }
            EventKind::PhaseEnds => {
                if let Some(open) = close(&mut open_ranges.phases, event) {
                    phases[open.number].ends_at = position;
                }
            }
            EventKind::Allocated => {
                let (call, path, phase_name, phase) = open_ranges.owner(event);
                let block = Block {
                    path,
                    phase: phase_name,
                    thread: event.thread,
                    allocated_at: Some(position),
                    ..before(event.address, event.bytes).0
                };
                let circumstances = Circumstances {
                    phase,
                    call,
                    freed_in: None,
                };
                blocks.push((block, circumstances));
                alive.insert(event.address, blocks.len() - 1);
            }
            EventKind::Freed => {
                let place = alive.remove(&event.address).unwrap_or_else(|| {
                    blocks.push(before(event.address, event.bytes));
                    blocks.len() - 1
                });
                let (block, circumstances) = &mut blocks[place];
                block.freed_at = Some(position);
                circumstances.freed_in = open_ranges.owner(event).0;
            }
        }
    }
    let blocks = blocks.into_iter().map(|(mut block, circumstances)| {
        if block.name.is_none() {
            block.kind = kind_of(&block, circumstances, &phases);
        }
        block
    });
    let mut blocks: Vec<Block> = blocks.collect();
    blocks.sort_by_key(|block| block.allocated_at); // stable; None comes first
    (blocks, phases)
}

fn before(address: usize, bytes: usize) -> (Block, Circumstances) {
    let block = Block {
        address,
        bytes: bytes as u64,
        kind: MemoryKind::Other,
        name: None,
        path: Path::ROOT,
        phase: "",
        thread: 0,
        allocated_at: None,
        freed_at: None,
    };
    (block, Circumstances::default())
}

/// Returns the use of a block. The first rule that applies decides; a label overrides all rules.
///
/// - Allocated before the recording, or outside of every phase: [`MemoryKind::Other`].
/// - Allocated by the cast of a weight: weight cast.
/// - Forward: scratch if freed in the same call of the same op. Otherwise logits for a cross-entropy and for the matmul
///   of [`TransformerLM`](crate::model::TransformerLM)'s head, and activations for everything else. Without a graph
///   such blocks are short-lived, and still count as activations.
/// - Backward: a gradient if alive when backward is done; otherwise scratch (gradients between ops).
/// - Optimizer: its state if alive when the optimizer is done; otherwise scratch.
fn kind_of(block: &Block, of: Circumstances, phases: &[PhaseSpan]) -> MemoryKind {
    let Some(phase) = of.phase.map(|number| &phases[number]) else {
        return MemoryKind::Other;
    };
    let outlives = block.freed_at.is_none_or(|event| event > phase.ends_at);
    let names = block.path.names();
    let op = names.last().map_or("", String::as_str);
    if op == WEIGHT_CAST {
        return MemoryKind::WeightCasts;
    }
    match (phase.name, outlives) {
        ("forward", _) if of.call.is_some() && of.call == of.freed_in => MemoryKind::Scratch,
        ("forward", _) => {
            let is_head = op == ops::LINEAR && names.iter().any(|name| name == HEAD);
            match is_head || ops::is_cross_entropy(op) {
                true => MemoryKind::Logits,
                false => MemoryKind::Activations,
            }
        }
        ("backward", true) => MemoryKind::Gradients,
        ("optimizer", true) => MemoryKind::Optimizer,
        ("backward" | "optimizer", false) => MemoryKind::Scratch,
        _ => MemoryKind::Other,
    }
}
