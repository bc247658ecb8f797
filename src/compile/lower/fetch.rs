//! Fetching of weights that other ranks update: each is broadcast by its owner.
//!
//! Weights are fetched at the beginning of a run, in the order in which they are read, and not at the end of the
//! previous run. On a GPU they then arrive while the first layers run.

use super::super::buffer::{Buffers, Location};
use super::super::op::Op;
use super::super::op::{BufferRange, Call, Phase};
use crate::probe::Path;
use std::collections::HashMap;
use std::ops::Range;

/// A nearly complete plan whose weights are fetched.
pub(super) struct Fetched<'a> {
    /// The rank that updates each parameter.
    pub owners: &'a [usize],
    /// The copies that matmuls read, by parameter.
    pub copies: &'a HashMap<usize, BufferRange>,
    pub buffers: &'a Buffers,
    pub on_gpu: bool,
}

impl Fetched<'_> {
    /// Adds the broadcasts.
    pub fn add(&self, calls: &mut Vec<Call>, per_micro_batch: &mut Range<usize>) {
        // On the CPU copies are made again in each run, from fetched parameters. On a GPU copies persist, so those of
        // other ranks' weights are fetched too.
        let position = match self.on_gpu {
            true => per_micro_batch.start,
            false => 0,
        };
        let readers = &calls[position..per_micro_batch.end];
        let mut fetched = Vec::new();
        for (number, root) in self.owners.iter().enumerate() {
            for weight in self.read_as(number) {
                if let Some(first) = readers.iter().position(|call| reads(call, &weight)) {
                    fetched.push((first, broadcast(weight, *root)));
                }
            }
        }
        fetched.sort_by_key(|(first, _)| *first);
        let added = fetched.len();
        calls.splice(
            position..position,
            fetched.into_iter().map(|(_, call)| call),
        );
        per_micro_batch.end += added;
        if !self.on_gpu {
            per_micro_batch.start += added;
        }
    }

    /// Returns the operands by which a parameter may be read: itself, and on a GPU its copy.
    fn read_as(&self, number: usize) -> impl Iterator<Item = BufferRange> {
        let location = Location::Parameter(number);
        let own = self.buffers.iter();
        let own = own.filter(move |(_, buffer)| buffer.location == location);
        let copy = self.copies.get(&number).filter(|_| self.on_gpu);
        own.map(|(id, _)| BufferRange::whole(self.buffers, id))
            .chain(copy.cloned())
    }
}

fn reads(call: &Call, weight: &BufferRange) -> bool {
    call.reads.iter().any(|operand| {
        operand.buffer == weight.buffer
            && operand.elements.start < weight.elements.end
            && weight.elements.start < operand.elements.end
    })
}

fn broadcast(weight: BufferRange, root: usize) -> Call {
    Call {
        op: Op::Broadcast {
            elements: weight.elements.len(),
            root,
        },
        path: "broadcast".into(),
        module: Path::ROOT,
        phase: Phase::Forward,
        cost_index: None,
        reads: [].into(),
        writes: [("x", weight)].into(),
    }
}
