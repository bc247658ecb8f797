//! From events to blocks: who took each, where, and for how long.

use super::block::{Block, Circumstances, PhaseSpan};
use super::buffer::{Event, What};
use super::{Label, MemoryKind, kind};
use crate::probe::Path;
use std::collections::HashMap;

/// What became of the events.
pub(super) struct Lives {
    pub blocks: Vec<Block>,
    pub phases: Vec<PhaseSpan>,
}

/// An op or a phase that has begun and not ended.
struct Open {
    thread: u32,
    /// The how-manieth of its kind.
    number: usize,
    path: Path,
    phase: &'static str,
}

/// What is open, as the events go by.
#[derive(Default)]
struct Around {
    ops: Vec<Open>,
    phases: Vec<Open>,
    calls: usize,
}

impl Around {
    /// The op that an event belongs to, and the place: the thread's own, or for a thread that is nowhere the latest.
    fn owner(&self, event: &Event) -> (Option<usize>, Path, &'static str, Option<usize>) {
        let is_nowhere = event.path == Path::ROOT && event.phase.is_empty();
        let of = |open: &&Open| is_nowhere || open.thread == event.thread;
        let op = self.ops.iter().rev().find(of);
        let phase = self.phases.iter().rev().find(of).map(|open| open.number);
        match op {
            Some(op) if is_nowhere => {
                let phase = self
                    .phases
                    .iter()
                    .rev()
                    .find(|open| open.thread == op.thread);
                let phase = phase.map(|open| open.number);
                (Some(op.number), op.path, op.phase, phase)
            }
            // Not the worker of an op: of nothing that is known, but in the phase that runs.
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

/// The blocks' lives.
pub(super) fn of(events: &[Event], labels: Vec<Label>) -> Lives {
    let mut around = Around::default();
    let mut phases: Vec<PhaseSpan> = Vec::new();
    let mut blocks: Vec<(Block, Circumstances)> = Vec::new();
    let mut alive: HashMap<usize, usize> = HashMap::new();
    let mut labels = labels.into_iter().peekable();
    let last = events.len().saturating_sub(1);
    for position in 0..=events.len() {
        while let Some(label) = labels.next_if(|label| label.position <= position) {
            let place = alive.get(&label.address).copied();
            let place = place.unwrap_or_else(|| {
                let block = before(label.address, label.bytes);
                blocks.push(block);
                alive.insert(label.address, blocks.len() - 1);
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
        match event.what {
            What::Begins => {}
            What::OpBegins => {
                around.ops.push(open(around.calls));
                around.calls += 1;
            }
            What::OpEnds => drop(close(&mut around.ops, event)),
            What::PhaseBegins => {
                around.phases.push(open(phases.len()));
                phases.push(PhaseSpan {
                    name: event.phase,
                    begins_at: position,
                    ends_at: last,
                });
            }
            What::PhaseEnds => {
                if let Some(open) = close(&mut around.phases, event) {
                    phases[open.number].ends_at = position;
                }
            }
            What::Taken => {
                let (call, path, phase_name, phase) = around.owner(event);
                let block = Block {
                    address: event.address,
                    bytes: event.bytes as u64,
                    kind: MemoryKind::Other,
                    name: None,
                    path,
                    phase: phase_name,
                    thread: event.thread,
                    taken_at: Some(position),
                    given_back_at: None,
                };
                let circumstances = Circumstances {
                    phase,
                    call,
                    given_back_in: None,
                };
                blocks.push((block, circumstances));
                alive.insert(event.address, blocks.len() - 1);
            }
            What::GivenBack => {
                let place = alive.remove(&event.address).unwrap_or_else(|| {
                    blocks.push(before(event.address, event.bytes));
                    blocks.len() - 1
                });
                let (block, circumstances) = &mut blocks[place];
                block.given_back_at = Some(position);
                circumstances.given_back_in = around.owner(event).0;
            }
        }
    }
    let blocks = blocks.into_iter().map(|(mut block, circumstances)| {
        if block.name.is_none() {
            block.kind = kind::of(&block, circumstances, &phases);
        }
        block
    });
    let mut blocks: Vec<Block> = blocks.collect();
    blocks.sort_by_key(|block| block.taken_at); // stable; none comes first
    Lives { blocks, phases }
}

/// A block that was there before.
fn before(address: usize, bytes: usize) -> (Block, Circumstances) {
    let block = Block {
        address,
        bytes: bytes as u64,
        kind: MemoryKind::Other,
        name: None,
        path: Path::ROOT,
        phase: "",
        thread: 0,
        taken_at: None,
        given_back_at: None,
    };
    let circumstances = Circumstances {
        phase: None,
        call: None,
        given_back_in: None,
    };
    (block, circumstances)
}
