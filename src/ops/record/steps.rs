//! What a call does to memory when it runs eagerly.

use super::spec::{Spec, elements_of};
use crate::graph::{MemoryStep, Room, Target};
use crate::ops::lowering::{Calls, KernelCall, Lowering, Signature, Slot};
use crate::ops::product;
use candle_core::DType;

/// Of forward, and of backward where these inputs are tracked. What kernels do is read off the calls: what is written
/// is made when it is first written, and scratch is freed when it was used last. An op without a lowering says itself.
pub(super) fn steps_of(
    op: &impl Spec,
    lowering: Option<Lowering>,
    call: &Signature<'_>,
    tracked: &[bool],
) -> [Vec<MemoryStep>; 2] {
    let (inputs, target) = (&call.inputs, call.target);
    let held = op.holds().map(MemoryStep::Hold).into_iter();
    let (forward, backward) = match lowering {
        Some(lowering) => (
            of_forward(op, call, &(lowering.forward)(call)),
            of_backward(op, call, &(lowering.backward)(call), tracked),
        ),
        None => (
            op.forward_steps(inputs, target),
            op.backward_steps(inputs, tracked, target),
        ),
    };
    [held.chain(forward).collect(), backward]
}

fn of_forward(op: &impl Spec, call: &Signature<'_>, calls: &Calls) -> Vec<MemoryStep> {
    let mut steps = Vec::new();
    for (step, last) in of(call, calls, (Vec::new(), Vec::new()), |_| true) {
        steps.extend(step);
        let reads = last.into_iter().filter_map(|slot| match slot {
            Slot::Read(index) if op.drops_read(index) => Some(MemoryStep::DropRead(index)),
            _ => None,
        });
        steps.extend(reads);
    }
    if !steps.contains(&MemoryStep::Output) {
        steps.push(MemoryStep::Output); // a copy of an input
    }
    steps
}

fn of_backward(
    op: &impl Spec,
    call: &Signature<'_>,
    calls: &Calls,
    tracked: &[bool],
) -> Vec<MemoryStep> {
    let kept: Vec<Slot> = (0..call.kept.len()).map(Slot::Kept).collect();
    let reads = call.reads.iter().enumerate();
    let made_again = reads.filter(|(index, _)| op.drops_read(*index));
    let (taken, rooms): (Vec<Slot>, Vec<MemoryStep>) = made_again
        .map(|(index, read)| {
            let room = Room {
                what: "weight, made again",
                formula: "",
                elements: elements_of(read.dims),
                element_bytes: read.dtype.size_in_bytes(),
            };
            (Slot::Read(index), MemoryStep::Take(room))
        })
        .unzip();
    let steps = of(call, calls, (kept, taken), |input| tracked[input]);
    let steps = rooms
        .into_iter()
        .chain(steps.into_iter().flat_map(|(steps, _)| steps));
    let dropped = match calls.writes_over_kept() {
        true => 0..call.kept.len(),
        false => 0..0,
    };
    let steps = steps.chain(dropped.map(MemoryStep::DropKept));
    let same = calls.same.iter().copied().filter(|input| tracked[*input]);
    steps.chain(same.map(MemoryStep::PassThrough)).collect()
}

/// The steps of each call, and what it is the last to use. What is `made` is there before them, and what is `taken`,
/// until it was used last.
fn of(
    call: &Signature<'_>,
    calls: &Calls,
    (mut made, mut taken): (Vec<Slot>, Vec<Slot>),
    wants: impl Fn(usize) -> bool,
) -> Vec<(Vec<MemoryStep>, Vec<Slot>)> {
    let needed = calls.needed(wants).into_iter();
    let steps = needed.map(|(kernel, last)| {
        let mut steps = Vec::new();
        for slot in kernel.writes.iter() {
            if made.contains(slot) {
                continue;
            }
            made.push(*slot);
            match *slot {
                Slot::Output => steps.push(MemoryStep::Output),
                Slot::Kept(kept) => steps.push(MemoryStep::Keep(kept)),
                Slot::Gradient(input) => steps.push(MemoryStep::Gradient(input)),
                Slot::Scratch(scratch) => {
                    let (shape, dtype) = &calls.scratch[scratch];
                    steps.push(MemoryStep::Take(Room {
                        what: "scratch",
                        formula: "",
                        elements: elements_of(shape),
                        element_bytes: dtype.size_in_bytes(),
                    }));
                    taken.push(*slot);
                }
                Slot::Input(_) | Slot::Read(_) | Slot::OutputGradient => {} // are there
            }
        }
        if call.target == Target::Cpu {
            steps.extend(room(call, calls, kernel).map(MemoryStep::Pass));
        }
        let done = taken.iter().enumerate();
        let done = done.filter(|(_, slot)| last.contains(slot));
        steps.extend(done.map(|(index, _)| MemoryStep::GiveBack(index)));
        (steps, last)
    });
    steps.collect()
}

/// What a kernel takes for itself on the CPU.
fn room(call: &Signature<'_>, calls: &Calls, kernel: &KernelCall) -> Option<Room> {
    let factor = kernel
        .reads
        .first()
        .map(|slot| dtype_of(call, calls, *slot));
    match (kernel.kernel.is_product(), factor) {
        (true, Some(dtype)) => product::packed(&kernel.kernel, dtype).ok(),
        _ => kernel.kernel.room(),
    }
}

fn dtype_of(call: &Signature<'_>, calls: &Calls, slot: Slot) -> DType {
    match slot {
        Slot::Input(i) | Slot::Gradient(i) => call.inputs[i].dtype,
        Slot::Output | Slot::OutputGradient => call.output.dtype,
        Slot::Read(i) => call.reads[i].dtype,
        Slot::Kept(i) => call.kept[i].dtype,
        Slot::Scratch(i) => calls.scratch[i].1,
    }
}
