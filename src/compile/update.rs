//! The update of a planned step: unscaling, the gradients' norm, clipping and rules.

use super::buffer::{BufferId, Category, Location};
use super::op::Op;
use super::op::{BufferRange, Phase};
use super::traced::Parameter;
use super::writer::Writer;
use crate::distributed::Shard;
use crate::inplace::wide;
use crate::kernels::cpu::update::muon::Iteration;
use crate::kernels::workspace;
use crate::ops::lowering::Named;
use crate::optim::rules::batches;
use crate::optim::{MuonConfig, Rule};
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
        let own = self.result_slots().into_iter();
        let own = own.filter(|place| place.is_own);
        let numbers: Vec<usize> = own.map(|place| place.number).collect();
        self.update(&numbers, factor);
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

    /// Adds the updates of these parameters, as far as this rank updates them. Muon's matrices come last, in batches.
    pub fn update(&mut self, numbers: &[usize], factor: Option<BufferId>) {
        let own = numbers.iter().filter(|number| self.is_own(**number));
        let updated: Vec<Updated> = own.filter_map(|number| self.updated(*number)).collect();
        self.plan.phase = Phase::Optimizer;
        let factor = factor.map(|factor| self.plan.whole(factor));
        let (mut matrices, mut of_muon) = (Vec::new(), Vec::new());
        for updated in updated {
            match updated.rule {
                Rule::Muon(muon) => {
                    let dims = &self.parameters[updated.number].shape;
                    matrices.push((muon.iteration(dims), wide(updated.dtype), ()));
                    of_muon.push((muon, updated));
                }
                _ => {
                    let (gradient, states) = (updated.gradient.clone(), self.states(&updated));
                    self.update_from(&updated, gradient, states, factor.clone());
                }
            }
        }
        for batch in batches(&matrices) {
            let ((iteration, wide, ()), (muon, _)) = (&matrices[batch[0]], &of_muon[batch[0]]);
            let batch: Vec<&Updated> = batch.iter().map(|place| &of_muon[*place].1).collect();
            self.update_matrices(*muon, iteration, *wide, &batch, factor.clone());
        }
    }

    /// Returns a parameter with its gradient, or `None` if the plan has no gradient of it or does not read it.
    fn updated(&self, number: usize) -> Option<Updated> {
        let gradient = self.gradients.get(number).cloned().flatten()?;
        let location = Location::Parameter(number);
        let mut buffers = self.plan.buffers.iter();
        let (parameter, buffer) = buffers.find(|(_, b)| b.location == location)?;
        Some(Updated {
            number,
            rule: self.parameters[number].rule,
            gradient,
            parameter: self.plan.whole(parameter),
            name: buffer.name.clone(),
            shape: buffer.shape.clone(),
            dtype: buffer.dtype,
        })
    }

    /// Adds the buffers of a parameter's state. Returns them by name.
    fn states(&mut self, updated: &Updated) -> Vec<(&'static str, BufferRange)> {
        let states = updated.rule.states(updated.dtype).into_iter().enumerate();
        let states = states.map(|(index, state)| {
            let (parameter, category) = (updated.number, Category::OptimizerState);
            let location = Location::State { parameter, index };
            let described = format!("{} of {}", state.name, updated.name);
            let buffers = &mut self.plan.buffers;
            let id = buffers.add(&described, &updated.shape, state.dtype, category, location);
            (state.name, self.plan.whole(id))
        });
        states.collect()
    }

    /// Adds the update of a parameter from its gradient, or from Muon's orthogonal direction.
    fn update_from(
        &mut self,
        updated: &Updated,
        gradient: BufferRange,
        states: Vec<(&'static str, BufferRange)>,
        factor: Option<BufferRange>,
    ) {
        self.plan.path = updated.rule.name().into();
        let op = Op::Update {
            rule: updated.rule,
            parameter: updated.number,
            elements: updated.parameter.elements.len(),
        };
        let reads = Named::from([("gradient", gradient)]).with_some("factor", factor);
        let copy = self.copies.get(&updated.number).cloned();
        let copy = copy.filter(|_| self.on_gpu);
        let parameter = ("parameter", updated.parameter.clone());
        let written: Vec<_> = [parameter].into_iter().chain(states).collect();
        self.plan
            .call(op, reads, Named::from(written).with_some("copy", copy));
    }

    /// Adds Muon's update of matrices of one shape. With sharded weights each rank computes its parts of the
    /// directions, and then iterates all of them.
    fn update_matrices(
        &mut self,
        rule: MuonConfig,
        iteration: &Iteration,
        wide: DType,
        batch: &[&Updated],
        factor: Option<BufferRange>,
    ) {
        let (count, n, [rows, columns]) = (batch.len(), iteration.elements(), iteration.shape);
        self.plan.path = Rule::from(rule).name().into();
        let shape = [count, rows, columns];
        let category = Category::Temporary;
        let directions = self.plan.arena("directions", &shape, wide, category);
        let shard = self
            .shares
            .as_ref()
            .filter(|shares| shares.owners.is_none());
        let shard = shard.map(|shares| shares.own);
        let own = |i: usize| {
            let part = shard.unwrap_or(Shard::SINGLE).part(n);
            BufferRange {
                buffer: directions,
                elements: i * n + part.start..i * n + part.end,
            }
        };
        for (i, updated) in batch.iter().enumerate() {
            let op = Op::Momentum {
                parameter: updated.number,
                elements: updated.parameter.elements.len(),
            };
            let reads = Named::from([("gradient", updated.gradient.clone())]);
            let reads = reads.with_some("factor", factor.clone());
            let writes = Named::from(self.states(updated)).with("direction", own(i));
            self.plan.call(op, reads, writes);
        }
        for i in (0..count).filter(|_| shard.is_some()) {
            let x = BufferRange {
                buffer: directions,
                elements: i * n..(i + 1) * n,
            };
            self.plan
                .call(Op::AllGather { elements: n }, [], [("x", x)]);
        }
        let mut writes = Named::from([("directions", self.plan.whole(directions))]);
        for (name, elements, dtype) in iteration.scratch(count, wide, self.on_gpu) {
            let scratch = self.plan.arena(name, &[elements], dtype, Category::Scratch);
            writes.push(name, self.plan.whole(scratch));
        }
        let op = Op::Orthogonalize {
            rule,
            count,
            shape: iteration.shape,
        };
        self.plan.call(op, [], writes);
        for (i, updated) in batch.iter().enumerate() {
            self.update_from(updated, own(i), Vec::new(), factor.clone());
        }
    }
}

/// A parameter, or this rank's part of it, that is updated.
struct Updated {
    number: usize,
    rule: Rule,
    gradient: BufferRange,
    parameter: BufferRange,
    name: String,
    shape: Vec<usize>,
    dtype: DType,
}
