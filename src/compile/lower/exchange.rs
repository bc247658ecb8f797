//! Averaging of gradients over the ranks of a job: which gradients share a bucket, and when each bucket is exchanged.
//!
//! This is a pass over finished calls. It finds the last call of a micro-batch that accesses each gradient, moves
//! gradients that are completed one after another to one buffer, and adds the exchange of that buffer. The mean loss is
//! averaged separately, so that every rank reports the same loss.

use super::super::arena::ALIGNMENT_BYTES;
use super::super::buffer::{BufferId, Buffers, Category};
use super::super::op::Op;
use super::super::op::{BufferRange, Call, Phase};
use crate::distributed::{Exchange, ReplicatedConfig};
use crate::probe::Path;
use candle_core::DType;
use std::collections::HashMap;
use std::ops::Range;

/// A nearly complete plan whose gradients are averaged.
pub(super) struct Averaged<'a> {
    pub calls: &'a mut Vec<Call>,
    pub buffers: &'a mut Buffers,
    /// Grows by the calls that are added to it.
    pub per_micro_batch: &'a mut Range<usize>,
    /// The gradients' operands after the run; updated when gradients move to a bucket.
    pub gradients: &'a mut [Option<BufferRange>],
    /// The rank that needs each parameter's gradient; `None` if all ranks need all.
    pub owners: Option<&'a [usize]>,
    pub kept: &'a mut Vec<BufferId>,
    pub loss: Option<BufferId>,
}

/// Buffers that are exchanged together.
struct Bucket {
    /// Each buffer with its first element in the bucket.
    members: Vec<(BufferId, usize)>,
    elements: usize,
    dtype: DType,
    /// The index of the call that the exchange is inserted before.
    position: usize,
}

impl Averaged<'_> {
    /// Adds the exchange of the loss alone.
    pub fn add_loss(&mut self) {
        if let Some(loss) = self.loss {
            self.insert(&self.alone(loss), &HashMap::new());
        }
    }

    /// Adds the exchanges of gradients and loss.
    pub fn add(&mut self, config: &ReplicatedConfig) {
        let mut buckets = self.buckets(config.exchange);
        buckets.extend(self.loss.map(|loss| self.alone(loss)));
        let moved = self.join(&buckets);
        self.rename(&moved);
        self.order_updates(&buckets, &moved);
        // Last position first, so that insertions do not shift the other positions.
        buckets.sort_by_key(|bucket| bucket.position);
        for bucket in buckets.iter().rev() {
            self.insert(bucket, &moved);
        }
    }

    /// Returns the index after the last call of a micro-batch that accesses a buffer.
    fn completed(&self, buffer: BufferId) -> usize {
        let calls = &self.calls[self.per_micro_batch.clone()];
        let touches = |call: &Call| call.operands().any(|operand| operand.buffer == buffer);
        let last = calls.iter().rposition(touches);
        self.per_micro_batch.start + last.map_or(calls.len(), |last| last + 1)
    }

    fn alone(&self, buffer: BufferId) -> Bucket {
        Bucket {
            members: vec![(buffer, 0)],
            elements: self.buffers[buffer].elements(),
            dtype: self.buffers[buffer].dtype,
            position: self.completed(buffer),
        }
    }

    fn buckets(&self, exchange: Exchange) -> Vec<Bucket> {
        let mut gradients: Vec<BufferId> =
            self.gradients.iter().flatten().map(|g| g.buffer).collect();
        gradients.sort();
        gradients.dedup(); // stacked weights share a gradient buffer
        let alone = gradients.into_iter().map(|gradient| self.alone(gradient));
        let mut alone: Vec<Bucket> = alone.collect();
        alone.sort_by_key(|bucket| bucket.position);
        let is_full = |bucket: &Bucket| {
            let bytes = bucket.elements * bucket.dtype.size_in_bytes();
            bytes as u64 >= exchange.bucket_bytes()
        };
        let mut buckets: Vec<Bucket> = Vec::new();
        for next in alone {
            let mut open = buckets.iter_mut();
            let open = open.find(|bucket| bucket.dtype == next.dtype && !is_full(bucket));
            match open {
                Some(bucket) => bucket.take(next),
                None => buckets.push(next),
            }
        }
        if !matches!(exchange, Exchange::Overlapped { .. }) {
            for bucket in &mut buckets {
                bucket.position = self.per_micro_batch.end;
            }
        }
        buckets
    }

    /// Allocates the buffers of buckets with several members. Returns the bucket's buffer and the first element of each
    /// member.
    fn join(&mut self, buckets: &[Bucket]) -> HashMap<BufferId, (BufferId, usize)> {
        let mut moved = HashMap::new();
        for bucket in buckets.iter().filter(|bucket| bucket.members.len() > 1) {
            let name = format!("{} gradients", bucket.members.len());
            let (shape, category) = ([bucket.elements], Category::Gradient);
            let joined = self.buffers.arena(&name, &shape, bucket.dtype, category);
            self.kept.push(joined);
            let members = bucket.members.iter();
            moved.extend(members.map(|(member, first)| (*member, (joined, *first))));
        }
        moved
    }

    fn rename(&mut self, moved: &HashMap<BufferId, (BufferId, usize)>) {
        let calls = self.calls.iter_mut();
        let operands = calls.flat_map(|call| call.reads.iter_mut().chain(call.writes.iter_mut()));
        for operand in operands.chain(self.gradients.iter_mut().flatten()) {
            if let Some((buffer, first)) = moved.get(&operand.buffer) {
                operand.buffer = *buffer;
                operand.elements.start += first;
                operand.elements.end += first;
            }
        }
        self.kept.retain(|buffer| !moved.contains_key(buffer));
    }

    /// If updates depend on nothing but their gradients, sorts them by the gradients' exchange, so that they run during
    /// the later exchanges.
    fn order_updates(&mut self, buckets: &[Bucket], moved: &HashMap<BufferId, (BufferId, usize)>) {
        let updates = &mut self.calls[self.per_micro_batch.end..];
        if !updates
            .iter()
            .all(|call| matches!(call.op, Op::Update { .. }))
        {
            return;
        }
        let positions = buckets.iter().map(|bucket| {
            let (first, _) = bucket.members[0];
            (
                moved.get(&first).map_or(first, |(joined, _)| *joined),
                bucket.position,
            )
        });
        let positions: HashMap<BufferId, usize> = positions.collect();
        updates.sort_by_key(|call| {
            let gradient = call.reads.get("gradient");
            gradient
                .and_then(|gradient| positions.get(&gradient.buffer))
                .copied()
        });
    }

    fn insert(&mut self, bucket: &Bucket, moved: &HashMap<BufferId, (BufferId, usize)>) {
        let (first, _) = bucket.members[0];
        let buffer = moved.get(&first).map_or(first, |(joined, _)| *joined);
        let whole = BufferRange::whole(self.buffers, buffer);
        let before = bucket.position.checked_sub(1);
        let phase = before.map_or(Phase::Backward, |before| self.calls[before].phase);
        let exchange = |op: Op, x: BufferRange| Call {
            path: op.name().into(),
            module: Path::ROOT,
            op,
            phase,
            cost_index: None,
            reads: [].into(),
            writes: [("x", x)].into(),
        };
        let parts = self.parts_by_owner(buffer);
        let calls: Vec<Call> = match &parts[..] {
            [] => {
                let elements = whole.elements.len();
                vec![exchange(Op::AllReduce { elements }, whole)]
            }
            parts => {
                let parts = parts.iter();
                let calls = parts.map(|(root, elements)| {
                    let (root, elements) = (*root, elements.clone());
                    let op = Op::Reduce {
                        elements: elements.len(),
                        root,
                    };
                    exchange(op, BufferRange { buffer, elements })
                });
                calls.collect()
            }
        };
        self.per_micro_batch.end += calls.len();
        let position = bucket.position;
        self.calls.splice(position..position, calls);
    }

    /// Returns the elements of a gradient buffer that each rank needs; empty if all ranks need all.
    fn parts_by_owner(&self, buffer: BufferId) -> Vec<(usize, Range<usize>)> {
        let owners = self.owners.unwrap_or_default();
        let gradients = self.gradients.iter().zip(owners);
        let inside = gradients.filter_map(|(gradient, owner)| {
            let gradient = gradient
                .as_ref()
                .filter(|gradient| gradient.buffer == buffer)?;
            Some((*owner, gradient.elements.clone()))
        });
        let mut inside: Vec<(usize, Range<usize>)> = inside.collect();
        inside.sort_by_key(|(_, elements)| elements.start);
        let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
        for (owner, elements) in inside {
            match parts.last_mut() {
                Some((last, part)) if *last == owner => part.end = elements.end,
                _ => parts.push((owner, elements)),
            }
        }
        parts
    }
}

impl Bucket {
    /// Appends another bucket's buffers, aligned for kernels.
    fn take(&mut self, other: Bucket) {
        let alignment = ALIGNMENT_BYTES as usize / self.dtype.size_in_bytes();
        let first = self.elements.next_multiple_of(alignment);
        let others = other.members.into_iter();
        self.members
            .extend(others.map(|(buffer, at)| (buffer, first + at)));
        self.elements = first + other.elements;
        self.position = self.position.max(other.position);
    }
}
