//! What kernel calls do to memory when they run eagerly.

use crate::graph::{MemoryStep, Room};
use crate::ops::lowering::{Calls, Slot};

/// A forward's steps: what is written is made when it is first written, and scratch is freed when it was read last.
pub(super) fn of_forward(calls: &Calls) -> Vec<MemoryStep> {
    let mut steps = of(calls);
    if !steps.contains(&MemoryStep::Output) {
        steps.push(MemoryStep::Output); // a copy
    }
    steps
}

/// A backward's.
pub(super) fn of_backward(calls: &Calls) -> Vec<MemoryStep> {
    let mut steps = of(calls);
    steps.extend(calls.same.iter().copied().map(MemoryStep::PassThrough));
    steps
}

fn of(calls: &Calls) -> Vec<MemoryStep> {
    let mut steps = Vec::new();
    let mut made: Vec<Slot> = Vec::new();
    let mut taken: Vec<Slot> = Vec::new();
    for (i, call) in calls.calls.iter().enumerate() {
        for slot in call.writes.iter().filter(|slot| !made.contains(slot)) {
            match *slot {
                Slot::Output => steps.push(MemoryStep::Output),
                Slot::Kept(kept) => steps.push(MemoryStep::Keep(kept)),
                Slot::Gradient(input) => steps.push(MemoryStep::gradient(input)),
                Slot::Scratch(scratch) => {
                    let (shape, dtype) = &calls.scratch[scratch];
                    steps.push(MemoryStep::Take(Room {
                        what: "scratch",
                        formula: "",
                        elements: super::elements_of(shape),
                        element_bytes: dtype.size_in_bytes(),
                    }));
                    taken.push(*slot);
                }
                Slot::Input(_) | Slot::Read(_) | Slot::OutputGradient => {} // are there
            }
        }
        made.extend(call.writes.iter());
        let later = &calls.calls[i + 1..];
        for (index, slot) in taken.iter().enumerate() {
            let is_used = |call: &crate::ops::lowering::KernelCall| {
                call.reads
                    .iter()
                    .chain(call.writes.iter())
                    .any(|other| other == slot)
            };
            if is_used(call) && !later.iter().any(is_used) {
                steps.push(MemoryStep::GiveBack(index));
            }
        }
    }
    steps
}
