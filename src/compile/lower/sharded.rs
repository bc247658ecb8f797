//! Sharded weights. They are gathered where forward and where backward first read them, and freed after the last read
//! there. Each rank gets the mean gradient of its shard.
//!
//! On a GPU exchanges run concurrently with the kernels. So weights are gathered ahead of their modules, and gradients
//! are waited for some modules later. The distance is the number of modules that fill a bucket.

use super::super::buffer::{BufferId, Buffers, Category, Location};
use super::super::op::Op;
use super::super::op::{BufferRange, Call, Phase};
use super::{Lower, sub_range};
use crate::distributed::Shard;
use crate::graph::ValueId;
use crate::ops::arithmetic::lowering::accumulated;
use crate::ops::lowering::{Accumulate, converted};
use crate::probe::Path;
use candle_core::DType;
use std::collections::{HashMap, HashSet};

/// The state of sharded weights during lowering.
#[derive(Default)]
pub(super) struct Sharded {
    /// The gathered weights, by dtype.
    full: HashMap<(ValueId, DType), BufferRange>,
    /// The buffers of weights gathered in forward, in order, without those of the loss.
    gathered: Vec<BufferId>,
    /// Parameters whose gradients are complete on this rank.
    pub complete: Vec<usize>,
    /// Parameters whose gradient exchange has started.
    exchanged: Vec<usize>,
}

impl Lower<'_> {
    /// Returns this rank's shard of a weight, if the weight is sharded.
    pub(super) fn shard_of(&self, weight: ValueId) -> Option<Shard> {
        let config = self.request.config;
        config.ranks.fully_sharded()?;
        let number = self.request.function.numbers.get(&weight);
        number.and(config.ranks.shard())
    }

    /// Returns the gathered full weights, stacked.
    pub(super) fn gathered(&mut self, weights: &[ValueId], dtype: DType) -> BufferRange {
        if let Some(whole) = self.weights.sharded.full.get(&(weights[0], dtype)) {
            return match weights {
                [_] => whole.clone(),
                _ => self.plan.whole(whole.buffer),
            };
        }
        let places = self.stack("all of", weights, dtype, Category::WeightCopy);
        let cost_index = self.plan.cost_index.take(); // exchanges belong to no part
        for (weight, place) in weights.iter().zip(&places) {
            let key = (*weight, dtype);
            self.weights.sharded.full.insert(key, place.clone());
            let own = self.own_shard(*weight);
            let to = self.own_elements(place);
            self.plan.call(converted(), [("x", own)], [("y", to)]);
        }
        for place in &places {
            let elements = place.elements.len();
            let op = Op::AllGather { elements };
            self.plan.call(op, [], [("x", place.clone())]);
        }
        self.plan.cost_index = cost_index;
        if self.plan.phase == Phase::Forward {
            self.weights.sharded.gathered.push(places[0].buffer);
        }
        self.plan.whole(places[0].buffer)
    }

    /// Returns the operand of this rank's shard of a weight.
    fn own_shard(&mut self, weight: ValueId) -> BufferRange {
        if let Some(own) = &self.places[weight.0] {
            return own.clone();
        }
        let number = self.request.function.numbers[&weight];
        let parameter = &self.request.function.parameters[number];
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

    /// Returns this rank's shard of a full weight or of its copy or gradient.
    fn own_elements(&self, whole: &BufferRange) -> BufferRange {
        let own = self.shard().part(whole.elements.len());
        sub_range(whole, own.start, own.len())
    }

    fn shard(&self) -> Shard {
        self.request.config.ranks.shard().unwrap_or(Shard::SINGLE)
    }

    /// Frees the weights that forward gathered; backward gathers them again. On a GPU the last bucket is kept, because
    /// backward reads it first.
    pub(super) fn free_weights(&mut self) {
        let Some(config) = self.request.config.ranks.fully_sharded() else {
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
        let whole = &mut self.weights.sharded.full;
        whole.retain(|_, place| kept.contains(&place.buffer));
        let numbers = &self.request.function.numbers;
        self.dense
            .retain(|(value, _), _| !numbers.contains_key(&ValueId(*value)));
    }

    /// Exchanges complete gradients after a module's backward, if they fill a bucket. Keeps this rank's shards of the
    /// gradients that were exchanged before.
    pub(super) fn scatter_gradients(&mut self) {
        let Some(sharded) = self.request.config.ranks.fully_sharded() else {
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
        let cost_index = self.plan.cost_index.take();
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
        self.plan.cost_index = cost_index;
    }

    /// Exchanges all remaining gradients after backward.
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
            DType::BF16 => DType::F32, // for the update, which needs the parameter's dtype
            dtype => dtype,
        };
        let name = format!(
            "gradient of {}",
            self.request.function.parameters[number].name
        );
        let (shape, category) = ([from.elements.len()], Category::Gradient);
        let own = self.plan.buffers.arena(&name, &shape, dtype, category);
        let own = self.plan.whole(own);
        let kernel = match self.request.config.accumulation {
            1 => converted(),
            _ => accumulated(Accumulate::AfterFirst),
        };
        self.plan.call(kernel, [("x", from)], [("y", own.clone())]);
        self.weights.gradients[number] = Some(own);
    }
}

/// Moves the gathers of a micro-batch's calls ahead: each stretch of modules, with `bucket_bytes` of weights, is
/// gathered where the stretch before it begins.
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

/// Calls of consecutive modules.
#[derive(Default)]
struct Stretch {
    module: Option<Path>,
    /// The bytes of weights that they gather.
    bytes: u64,
    /// Calls that copy this rank's shards into the full weights.
    parts: Vec<Call>,
    exchanges: Vec<Call>,
    others: Vec<Call>,
}
