//! Weights that every rank has a part of: gathered where forward and where backward first read them, freed after they
//! were read last there; and their gradients, of which each rank gets the mean of its part.
//!
//! On a GPU exchanges run beside the kernels. So weights are gathered some modules ahead, and gradients are waited for
//! some modules later: as many as have the bytes of a bucket.

use super::super::buffer::{BufferId, Buffers, Category, Location};
use super::super::op::Op;
use super::super::plan::{BufferRange, Call, Phase};
use super::{Lower, part};
use crate::distributed::Shard;
use crate::graph::ValueId;
use crate::ops::arithmetic::lowering::accumulated;
use crate::ops::lowering::{Accumulate, converted};
use crate::probe::Path;
use candle_core::DType;
use std::collections::{HashMap, HashSet};

/// What has become of such weights so far.
#[derive(Default)]
pub(super) struct Sharded {
    /// All of a weight, in a dtype.
    whole: HashMap<(ValueId, DType), BufferRange>,
    /// Where forward has gathered weights, in order, but for those of the loss.
    gathered: Vec<BufferId>,
    /// Parameters whose gradients are complete on this rank.
    pub complete: Vec<usize>,
    /// The same, whose exchange has begun.
    exchanged: Vec<usize>,
}

impl Lower<'_> {
    /// This rank's part of a weight, if ranks have parts of it.
    pub(super) fn part_of(&self, weight: ValueId) -> Option<Shard> {
        let config = self.job.config;
        config.ranks.fully_sharded()?;
        let number = self.job.function.numbers.get(&weight);
        number.and(config.ranks.shard())
    }

    /// All of weights that ranks have parts of, one under the other.
    pub(super) fn gathered(&mut self, weights: &[ValueId], dtype: DType) -> BufferRange {
        if let Some(whole) = self.weights.sharded.whole.get(&(weights[0], dtype)) {
            return match weights {
                [_] => whole.clone(),
                _ => self.plan.whole(whole.buffer),
            };
        }
        let places = self.stack("all of", weights, dtype, Category::WeightCopy);
        let part_of_step = self.plan.part.take(); // exchanges belong to none
        for (weight, place) in weights.iter().zip(&places) {
            let key = (*weight, dtype);
            self.weights.sharded.whole.insert(key, place.clone());
            let own = self.own_part(*weight);
            let to = self.own_elements(place);
            self.plan.call(converted(), [("x", own)], [("y", to)]);
        }
        for place in &places {
            let elements = place.elements.len();
            let op = Op::AllGather { elements };
            self.plan.call(op, [], [("x", place.clone())]);
        }
        self.plan.part = part_of_step;
        if self.plan.phase == Phase::Forward {
            self.weights.sharded.gathered.push(places[0].buffer);
        }
        self.plan.whole(places[0].buffer)
    }

    /// Where this rank's part of a weight lies.
    fn own_part(&mut self, weight: ValueId) -> BufferRange {
        if let Some(own) = &self.places[weight.0] {
            return own.clone();
        }
        let number = self.job.function.numbers[&weight];
        let parameter = &self.job.function.parameters[number];
        let elements = self.shard().part(parameter.elements).len();
        let (category, location) = (Category::Parameter, Location::Parameter(number));
        let dtype = self.program.value(weight).dtype;
        let name = format!("part of {}", parameter.name);
        let buffers = &mut self.plan.buffers;
        let own = buffers.add(&name, &[elements], dtype, category, location);
        let own = self.plan.whole(own);
        self.places[weight.0] = Some(own.clone());
        own
    }

    /// This rank's part of something of a weight.
    fn own_elements(&self, whole: &BufferRange) -> BufferRange {
        let own = self.shard().part(whole.elements.len());
        part(whole, own.start, own.len())
    }

    fn shard(&self) -> Shard {
        self.job.config.ranks.shard().unwrap_or(Shard::ALONE)
    }

    /// Forward is over: what it has gathered is freed, and backward gathers it again; but not, on a GPU, the last
    /// bucket of it, which backward reads first.
    pub(super) fn free_weights(&mut self) {
        let Some(config) = self.job.config.ranks.fully_sharded() else {
            return;
        };
        let mut left_bytes = match self.is_on_gpu() {
            true => config.bucket_bytes,
            false => 0,
        };
        let mut kept = HashSet::new();
        for buffer in self.weights.sharded.gathered.drain(..).rev() {
            if left_bytes == 0 {
                break;
            }
            left_bytes = left_bytes.saturating_sub(self.plan.buffers[buffer].bytes());
            kept.insert(buffer);
        }
        let whole = &mut self.weights.sharded.whole;
        whole.retain(|_, place| kept.contains(&place.buffer));
        let numbers = &self.job.function.numbers;
        self.dense
            .retain(|(value, _), _| !numbers.contains_key(&ValueId(*value)));
    }

    /// The backward of a module is over: gradients that are complete are exchanged, once they are enough, and those of
    /// before, which have been, are kept, this rank's part of them.
    pub(super) fn scatter_gradients(&mut self) {
        let Some(sharded) = self.job.config.ranks.fully_sharded() else {
            return;
        };
        let complete = self.weights.sharded.complete.iter();
        let gradients = complete.filter_map(|number| self.weights.gradients[*number].as_ref());
        let bytes = gradients.map(|gradient| {
            let width = self.plan.buffers[gradient.buffer].dtype.size_in_bytes();
            (gradient.elements.len() * width) as u64
        });
        if bytes.sum::<u64>() >= sharded.bucket_bytes {
            self.scatter_complete();
        }
    }

    fn scatter_complete(&mut self) {
        let part_of_step = self.plan.part.take();
        for number in std::mem::take(&mut self.weights.sharded.exchanged) {
            self.keep_own_gradient(number);
        }
        let complete = std::mem::take(&mut self.weights.sharded.complete);
        for number in &complete {
            if let Some(gradient) = self.weights.gradients[*number].clone() {
                let elements = gradient.elements.len();
                let op = Op::ReduceScatter { elements };
                self.plan.call(op, [], [("x", gradient)]);
            }
        }
        self.weights.sharded.exchanged = complete;
        self.plan.part = part_of_step;
    }

    /// Backward is over.
    pub(super) fn scatter_all_gradients(&mut self) {
        while !self.weights.sharded.complete.is_empty()
            || !self.weights.sharded.exchanged.is_empty()
        {
            self.scatter_complete();
        }
    }

    fn keep_own_gradient(&mut self, number: usize) {
        let Some(whole) = self.weights.gradients[number].take() else {
            return;
        };
        let from = self.own_elements(&whole);
        let dtype = match self.plan.buffers[whole.buffer].dtype {
            DType::BF16 => DType::F32, // for the update, which reads the parameter in it
            dtype => dtype,
        };
        let name = format!("gradient of {}", self.job.function.parameters[number].name);
        let (shape, category) = ([from.elements.len()], Category::Gradient);
        let own = self.plan.buffers.arena(&name, &shape, dtype, category);
        let own = self.plan.whole(own);
        let kernel = match self.job.config.accumulation {
            1 => converted(),
            _ => accumulated(Accumulate::AfterFirst),
        };
        self.plan.call(kernel, [("x", from)], [("y", own.clone())]);
        self.weights.gradients[number] = Some(own);
    }
}

/// A micro-batch's calls, with the weights that modules read gathered where the ones before begin: of so many modules
/// together that the weights have `bucket_bytes`.
pub(super) fn gather_ahead(calls: Vec<Call>, buffers: &Buffers, bucket_bytes: u64) -> Vec<Call> {
    let is_exchange = |call: &&Call| matches!(call.op, Op::AllGather { .. });
    let gathered = calls.iter().filter(is_exchange);
    let gathered: HashSet<_> = gathered
        .map(|call| call.writes.operand("x").buffer)
        .collect();
    let mut stretches = Vec::new();
    let mut stretch = Stretch::default();
    for call in calls {
        let module = Some(call.module);
        if stretch.bytes >= bucket_bytes && stretch.module != module {
            stretches.push(std::mem::take(&mut stretch));
        }
        stretch.module = module;
        let written = call.writes.iter().map(|operand| operand.buffer);
        let written = written.collect::<Vec<_>>();
        match written.iter().find(|buffer| gathered.contains(buffer)) {
            Some(buffer) => match call.op {
                Op::AllGather { elements } => {
                    let width = buffers[*buffer].dtype.size_in_bytes();
                    stretch.bytes += (elements * width) as u64;
                    stretch.exchanges.push(call);
                }
                _ => stretch.parts.push(call),
            },
            None => stretch.others.push(call),
        }
    }
    stretches.push(stretch);
    let mut ahead = Vec::new();
    let mut others = Vec::new();
    for stretch in stretches {
        ahead.extend(stretch.parts);
        ahead.extend(stretch.exchanges);
        ahead.append(&mut others);
        others = stretch.others;
    }
    ahead.append(&mut others);
    ahead
}

/// Calls of modules that follow each other.
#[derive(Default)]
struct Stretch {
    module: Option<Path>,
    /// Of the weights that they gather.
    bytes: u64,
    /// Put this rank's parts of weights in their places.
    parts: Vec<Call>,
    exchanges: Vec<Call>,
    others: Vec<Call>,
}
