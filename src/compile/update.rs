//! The update of a planned step: unscaling, the gradients' norm, clipping and rules.

use super::buffer::{BufferId, Category, Location};
use super::op::Op;
use super::op::{BufferRange, Phase};
use super::traced::Parameter;
use super::writer::Writer;
use crate::distributed::Shard;
use crate::kernels::workspace;
use crate::ops::lowering::Named;
use candle_core::DType;
use std::collections::HashMap;

/// Writes the calls of the update. Parameters are given by index.
pub(super) struct Update<'a> {
    pub plan: &'a mut Writer,
    /// The gradient of each parameter that has one.
    pub gradients: &'a [Option<BufferRange>],
    /// The half-precision copies that the update renews, by parameter.
    pub copies: HashMap<usize, BufferRange>,
    /// The division of the update among ranks, if it is divided.
    pub shares: Option<Shares>,
    pub on_gpu: bool,
    pub parameters: &'a [Parameter],
}

/// The parameters that each rank updates.
#[derive(Clone)]
pub(super) struct Shares {
    pub own: Shard,
    /// The rank that updates each parameter; `None` if every rank updates its shard of each parameter.
    pub owners: Option<Vec<usize>>,
}

impl Shares {
    /// Returns whether a rank updates a parameter or a shard of it.
    fn has(&self, rank: usize, number: usize) -> bool {
        let owners = self.owners.as_ref();
        owners.is_none_or(|owners| owners[number] == rank)
    }
}

/// The position of one gradient's result (a flag or a sum) in a buffer of per-gradient results.
struct ResultSlot {
    number: usize,
    rank: usize,
    is_own: bool,
}

impl Update<'_> {
    /// Returns whether this rank updates a parameter or its shard of it.
    fn is_own(&self, number: usize) -> bool {
        let shares = self.shares.as_ref();
        shares.is_none_or(|shares| shares.has(shares.own.rank, number))
    }

    /// Returns the order of per-gradient results in a buffer: rank by rank. Parameters without a gradient have none.
    fn result_slots(&self) -> Vec<ResultSlot> {
        let (own, world_size) = match &self.shares {
            Some(shares) => (shares.own.rank, shares.own.world_size),
            None => (0, 1),
        };
        let of_rank = |rank: usize| {
            let numbers = 0..self.gradients.len();
            let (shares, gradients) = (self.shares.as_ref(), self.gradients);
            let has = move |number: &usize| {
                let is_there = gradients[*number].is_some();
                is_there && shares.is_none_or(|shares| shares.has(rank, *number))
            };
            numbers.filter(has).map(move |number| ResultSlot {
                number,
                rank,
                is_own: rank == own,
            })
        };
        (0..world_size).flat_map(of_rank).collect()
    }

    /// Gathers a buffer of per-gradient results, of which each rank has computed its own part.
    fn gather(&mut self, buffer: BufferId, places: &[ResultSlot]) {
        if self.shares.is_none() {
            return;
        }
        let mut start = 0;
        for of_rank in places.chunk_by(|a, b| a.rank == b.rank) {
            let (root, elements) = (of_rank[0].rank, of_rank.len());
            let part = BufferRange {
                buffer,
                elements: start..start + elements,
            };
            start += elements;
            let op = Op::Broadcast { elements, root };
            self.plan.call(op, [], [("x", part)]);
        }
    }

    /// Adds the full update after all gradients: unscaling, clipping, rules.
    pub fn run(&mut self, scales: bool, clips: bool) {
        let mut factor = None;
        if scales {
            factor = self.unscale();
        }
        if clips {
            factor = Some(self.clip_factor());
        }
        // In the order of the sums: on a GPU both use one table.
        for place in self.result_slots().iter().filter(|place| place.is_own) {
            self.update(place.number, factor);
        }
    }

    /// Adds the division of gradients by the loss scale and the overflow check. On the CPU the check ends the step. On
    /// a GPU the returned `factor` makes the updates do nothing.
    fn unscale(&mut self) -> Option<BufferId> {
        self.plan.phase = Phase::Optimizer;
        self.plan.path = "grad_scaler".into();
        let places = self.result_slots();
        let (found, dtype) = match self.on_gpu {
            true => ("not finite", DType::U32),
            false => ("finite", DType::U8),
        };
        let finite = self
            .plan
            .arena(found, &[places.len()], dtype, Category::Temporary);
        for (i, place) in places.iter().enumerate() {
            let gradient = self.gradients[place.number].clone();
            let Some(gradient) = gradient.filter(|_| place.is_own) else {
                continue;
            };
            let elements = gradient.elements.len();
            let is_finite = BufferRange {
                buffer: finite,
                elements: i..i + 1,
            };
            let writes = [("gradient", gradient), ("found", is_finite)];
            self.plan.call(Op::Unscale { elements }, [], writes);
        }
        self.gather(finite, &places);
        let first = self
            .plan
            .arena("first not finite", &[1], DType::U32, Category::Temporary);
        self.plan.kept.push(first);
        let factor = self.on_gpu.then(|| self.factor());
        let whole = |id| self.plan.whole(id);
        let reads = [("found", whole(finite))];
        let writes = Named::from([("first", whole(first))]).with_some("factor", factor.map(whole));
        let parameters = places.iter().map(|place| place.number).collect();
        let op = Op::CheckOverflow { parameters };
        self.plan.call(op, reads, writes);
        factor
    }

    /// Adds a buffer for the norm and the factor that gradients are multiplied by.
    fn factor(&mut self) -> BufferId {
        let words = if self.on_gpu { 3 } else { 2 };
        let factor = self
            .plan
            .arena("norm and factor", &[words], DType::F64, Category::Temporary);
        self.plan.kept.push(factor);
        factor
    }

    /// Adds the calls for the norm of all gradients. Returns the buffer of the norm and the clipping factor.
    fn clip_factor(&mut self) -> BufferId {
        self.plan.phase = Phase::Clip;
        self.plan.path = "clip_grad_norm".into();
        let places = self.result_slots();
        let squares = self
            .plan
            .arena("squares", &[places.len()], DType::F64, Category::Temporary);
        let own = places.iter().filter(|place| place.is_own);
        let own = own.filter_map(|place| self.gradients[place.number].as_ref());
        let all_chunks = own.map(|gradient| workspace::chunks(gradient.elements.len()));
        let all_chunks = [all_chunks.sum()];
        let chunks = self.on_gpu.then(|| {
            self.plan
                .arena("chunks", &all_chunks, DType::F64, Category::Scratch)
        });
        let mut chunk = 0;
        for (i, place) in places.iter().enumerate() {
            let gradient = self.gradients[place.number].clone();
            let Some(gradient) = gradient.filter(|_| place.is_own) else {
                continue;
            };
            let elements = gradient.elements.len();
            let square = BufferRange {
                buffer: squares,
                elements: i..i + 1,
            };
            let first = chunk;
            chunk += workspace::chunks(elements);
            let chunks = chunks.map(|buffer| BufferRange {
                buffer,
                elements: first..chunk,
            });
            let writes = Named::from([("square", square)]).with_some("chunks", chunks);
            let op = Op::SumOfSquares { elements };
            self.plan.call(op, [("x", gradient)], writes);
        }
        self.gather(squares, &places);
        let factor = self.factor();
        let reads = [("squares", self.plan.whole(squares))];
        let writes = [("factor", self.plan.whole(factor))];
        let parameters = places.iter().map(|place| place.number).collect();
        let op = Op::ClipFactor { parameters };
        self.plan.call(op, reads, writes);
        factor
    }

    /// Adds the update of a parameter, if this rank updates it.
    pub fn update(&mut self, number: usize, factor: Option<BufferId>) {
        if !self.is_own(number) {
            return;
        }
        let Some(gradient) = self.gradients.get(number).cloned().flatten() else {
            return;
        };
        let location = Location::Parameter(number);
        let Some((parameter, buffer)) = self
            .plan
            .buffers
            .iter()
            .find(|(_, b)| b.location == location)
        else {
            return;
        };
        let (name, shape, dtype) = (buffer.name.clone(), buffer.shape.clone(), buffer.dtype);
        let rule = self.parameters[number].rule;
        let op = Op::Update {
            rule,
            parameter: number,
            elements: shape.iter().product(),
        };
        let category = Category::OptimizerState;
        let mut written = vec![("parameter", parameter)];
        for (index, state) in rule.states(dtype).into_iter().enumerate() {
            let parameter = number;
            let location = Location::State { parameter, index };
            let described = format!("{} of {name}", state.name);
            let buffers = &mut self.plan.buffers;
            let id = buffers.add(&described, &shape, state.dtype, category, location);
            written.push((state.name, id));
        }
        self.plan.phase = Phase::Optimizer;
        self.plan.path = rule.name().into();
        for (name, elements, dtype) in rule.scratch(&self.parameters[number].shape, dtype) {
            let scratch = self.plan.arena(name, &[elements], dtype, Category::Scratch);
            written.push((name, scratch));
        }
        let factor = factor.map(|factor| self.plan.whole(factor));
        let reads = Named::from([("gradient", gradient)]).with_some("factor", factor);
        let written = written
            .into_iter()
            .map(|(name, id)| (name, self.plan.whole(id)));
        let written: Vec<_> = written.collect();
        let copy = self.copies.get(&number).cloned().filter(|_| self.on_gpu);
        let writes = Named::from(written).with_some("copy", copy);
        self.plan.call(op, reads, writes);
    }
}
