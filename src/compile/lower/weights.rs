//! Weights: the copies that matmuls read, their gradients, and when they are updated.

use super::super::buffer::Category;
use super::super::op::BufferRange;
use super::super::program::Program;
use super::super::update::{Shares, Update};
use super::sharded::Sharded;
use super::{Lower, LowerRequest};
use crate::distributed::Shard;
use crate::graph::{ValueId, ValueRef};
use crate::ops::arithmetic::lowering::accumulated;
use crate::ops::lowering::{Accumulate, converted};
use candle_core::DType;
use std::collections::HashMap;

/// The state of weights during lowering.
pub(super) struct Weights {
    pub gradients: Vec<Option<BufferRange>>,
    /// The number of gradients still to be added, by parameter.
    remaining: Vec<usize>,
    /// Whether every read of a parameter computes a gradient for it, by parameter. Nothing reads it after its gradient
    /// is complete then.
    is_free_early: Vec<bool>,
    /// The copies of weights, in the dtype that matmuls read.
    copies: HashMap<ValueId, BufferRange>,
    pub sharded: Sharded,
    /// Parameters whose gradients are complete, to be updated after the module's backward.
    deferred: Vec<usize>,
    /// Parameters whose gradients are complete, to be updated at the end of backward.
    pub late: Vec<usize>,
}

impl Weights {
    pub fn new(program: &Program, job: &LowerRequest<'_>) -> Self {
        let count = job.function.parameters.len();
        let (mut to_come, mut is_free_early) = (vec![0; count], vec![true; count]);
        for node in &program.nodes {
            for (input, needs_grad) in node.inputs.iter().zip(&node.needs_grad) {
                let weights = program.weights_of(input.value);
                for number in weights.iter().filter_map(|w| job.function.numbers.get(w)) {
                    match needs_grad {
                        true => to_come[*number] += 1,
                        false => is_free_early[*number] = false,
                    }
                }
            }
        }
        Self {
            gradients: vec![None; count],
            remaining: to_come,
            is_free_early,
            copies: HashMap::new(),
            sharded: Sharded::default(),
            deferred: Vec::new(),
            late: Vec::new(),
        }
    }
}

impl Lower<'_> {
    /// Returns the index of a parameter, if the plan has a backward.
    pub(super) fn trained(&self, value: ValueId) -> Option<usize> {
        let number = self.request.function.numbers.get(&value).copied();
        number.filter(|_| self.request.kind.has_backward())
    }

    /// Makes the copies of all weights that matmuls read, before the first micro-batch, for all micro-batches.
    pub(super) fn copy_weights(&mut self) {
        if self.request.config.ranks.fully_sharded().is_some() {
            return; // gathered weights exist only while they are used
        }
        let program = self.program.clone();
        for (copy, node) in program.copies() {
            self.plan.path.clone_from(&node.path);
            self.value(copy);
        }
    }

    /// Returns whether an operand is a full trained parameter, or a stack of such.
    pub(super) fn is_trained(&self, operand: &ValueRef) -> bool {
        let weights = self.program.weights_of(operand.value);
        self.program.is_leaf(operand) && self.trained(weights[0]).is_some()
    }

    /// Returns the copies of weights that matmuls in `dtype` read, stacked. They are made before the first matmul of a
    /// step that reads them.
    pub(super) fn copy_of(&mut self, weights: &[ValueId], dtype: DType) -> BufferRange {
        let first = weights[0];
        if self.shard_of(first).is_some() {
            return self.gathered(weights, dtype);
        }
        if let Some(copy) = self.weights.copies.get(&first) {
            return match weights {
                [_] => copy.clone(),
                _ => self.plan.whole(copy.buffer),
            };
        }
        let places = self.stack("copy of", weights, dtype, Category::WeightCopy);
        for (weight, place) in weights.iter().zip(&places) {
            let operand = self.value(*weight);
            self.weights.copies.insert(*weight, place.clone());
            self.plan
                .call(converted(), [("x", operand)], [("y", place.clone())]);
        }
        self.plan.whole(places[0].buffer)
    }

    /// Returns the gradients of parameters, stacked, and whether the kernel that computes them accumulates.
    pub(super) fn gradient_of_weights(
        &mut self,
        weights: &[ValueId],
        dtype: DType,
    ) -> (BufferRange, Accumulate) {
        let numbers: Vec<usize> = weights.iter().filter_map(|w| self.trained(*w)).collect();
        if let Some(gradient) = numbers
            .first()
            .and_then(|n| self.weights.gradients[*n].clone())
        {
            return (gradient, Accumulate::Always);
        }
        let accumulate = match self.request.config.accumulation {
            1 => Accumulate::Never,
            // Shards are accumulated instead.
            _ if self.request.config.ranks.fully_sharded().is_some() => Accumulate::Never,
            _ => Accumulate::AfterFirst,
        };
        let places = self.stack("gradient of", weights, dtype, Category::Gradient);
        let gradient = self.plan.whole(places[0].buffer);
        for (number, place) in numbers.into_iter().zip(places) {
            self.weights.gradients[number] = Some(place);
        }
        (gradient, accumulate)
    }

    /// Returns the dtype of weight gradients that one matmul computes. With the optimizer in backward, only the update
    /// reads them. On a GPU they are then rounded to bf16 if the matmul's factors are bf16, as autocast rounds them
    /// there, which moves 4 bytes less per parameter. So are gradients that ranks exchange in bf16. (f16 does not have
    /// the range.)
    pub(super) fn dtype_of_matmul_gradient(&self, weights: &[ValueId], factors: DType) -> DType {
        let is_last = |weight: &ValueId| match self.trained(*weight) {
            Some(number) => self.weights.remaining[number] == 1,
            None => false,
        };
        let config = self.request.config;
        let is_rounded = config.ranks.exchanged() == Some(DType::BF16);
        let needs_grad = self.is_on_gpu() && (config.optimizer_in_backward || is_rounded);
        match factors {
            DType::F64 => DType::F64,
            DType::BF16 if needs_grad && weights.iter().all(is_last) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Adds a gradient that an op has computed separately to a parameter's gradient.
    pub(super) fn add_to_gradient(&mut self, value: ValueId, gradient: BufferRange) {
        let Some(number) = self.trained(value) else {
            return;
        };
        let config = self.request.config;
        let stays = config.accumulation == 1 || config.ranks.fully_sharded().is_some();
        let is_first = self.weights.gradients[number].is_none();
        let dtype = self.program.value(value).dtype;
        let wide = match dtype {
            DType::BF16 | DType::F16 => DType::F32,
            dtype => dtype,
        };
        // A sum must be f32, because matmuls accumulate in it.
        let is_sum = self.weights.remaining[number] > 1 && dtype != wide;
        if is_first && stays && !is_sum && self.may_be_overwritten(&gradient) {
            self.weights.gradients[number] = Some(gradient);
        } else {
            let (sum, accumulate) = self.gradient_of_weights(&[value], wide);
            let of_sum = self.plan.buffers[sum.buffer].dtype;
            let gradient = match self.plan.buffers[gradient.buffer].dtype == of_sum {
                true => gradient,
                false => {
                    let cast = self.temporary("gradient", &[gradient.elements.len()], of_sum);
                    let writes = [("y", cast.clone())];
                    self.plan.call(converted(), [("x", gradient)], writes);
                    cast
                }
            };
            let kernel = accumulated(accumulate);
            self.plan.call(kernel, [("x", gradient)], [("y", sum)]);
        }
        self.gradient_done(&[value]);
    }

    /// Notes that one gradient of each of these weights is done. A parameter whose gradient is complete is updated if
    /// nothing reads the parameter any more.
    pub(super) fn gradient_done(&mut self, weights: &[ValueId]) {
        let numbers: Vec<usize> = weights.iter().filter_map(|w| self.trained(*w)).collect();
        for number in numbers {
            self.weights.remaining[number] -= 1;
            if self.weights.remaining[number] == 0
                && self.request.config.ranks.fully_sharded().is_some()
            {
                self.weights.sharded.complete.push(number);
            }
            if self.weights.remaining[number] > 0 || !self.request.config.optimizer_in_backward {
                continue;
            }
            match (self.weights.is_free_early[number], self.is_on_gpu()) {
                (false, _) => self.weights.late.push(number),
                (true, true) => self.weights.deferred.push(number),
                (true, false) => self.update_in_backward(&[number]),
            }
        }
    }

    /// Updates a module's matrices after its backward, in one launch on a GPU. Vectors wait until the end, where one
    /// launch updates those of all modules.
    pub(super) fn update_matrices(&mut self) {
        let waiting = std::mem::take(&mut self.weights.deferred);
        let is_vector = |number: &usize| match &self.weights.gradients[*number] {
            Some(gradient) => self.plan.buffers[gradient.buffer].shape.len() == 1,
            None => false,
        };
        let (vectors, matrices): (Vec<usize>, Vec<usize>) =
            waiting.into_iter().partition(is_vector);
        self.weights.deferred = vectors;
        self.update_in_backward(&matrices);
    }

    pub(super) fn update_deferred(&mut self) {
        let waiting = std::mem::take(&mut self.weights.deferred);
        let late = std::mem::take(&mut self.weights.late);
        self.update_in_backward(&[waiting, late].concat());
    }

    fn update_in_backward(&mut self, numbers: &[usize]) {
        if numbers.is_empty() {
            return; // always so in a plan that updates at the end
        }
        let (path, phase) = (self.plan.path.clone(), self.plan.phase);
        let cost_index = self.plan.cost_index.take();
        self.updates().update(numbers, None);
        (self.plan.path, self.plan.phase, self.plan.cost_index) = (path, phase, cost_index);
    }

    /// Returns which parameters each rank updates, if the update is divided among ranks.
    pub(super) fn shares(&self) -> Option<Shares> {
        let config = self.request.config;
        let own = config.ranks.shard()?;
        if config.ranks.fully_sharded().is_some() {
            return Some(Shares { own, owners: None });
        }
        let parameters = self.request.function.parameters.iter();
        let sizes = parameters.map(|parameter| (parameter.name.as_str(), parameter.elements));
        let owners = Some(Shard::owners(own.world_size, sizes));
        Some(Shares { own, owners })
    }

    /// Returns the copies that matmuls read, by parameter.
    pub(super) fn copies(&self) -> HashMap<usize, BufferRange> {
        let numbers = self.request.function.numbers.iter();
        let copies = numbers
            .filter_map(|(value, number)| Some((*number, self.weights.copies.get(value)?.clone())));
        copies.collect()
    }

    pub(super) fn updates(&mut self) -> Update<'_> {
        Update {
            shares: self.shares(),
            on_gpu: self.is_on_gpu(),
            copies: self.copies(),
            plan: &mut self.plan,
            gradients: &self.weights.gradients,
            parameters: &self.request.function.parameters,
        }
    }

    /// Allocates a buffer for stacked copies or gradients of weights. Returns the range of each weight.
    pub(super) fn stack(
        &mut self,
        what: &str,
        weights: &[ValueId],
        dtype: DType,
        category: Category,
    ) -> Vec<BufferRange> {
        let described = weights.iter().map(|weight| self.name_and_shape(*weight));
        let (names, shapes): (Vec<String>, Vec<Vec<usize>>) = described.unzip();
        let mut shape = shapes[0].clone();
        shape[0] = shapes.iter().map(|shape| shape[0]).sum();
        let name = format!("{what} {}", names.join(" and "));
        let stack = self.plan.buffers.arena(&name, &shape, dtype, category);
        let mut end = 0;
        let places = shapes.iter().map(|shape| {
            let start = end;
            end += shape.iter().product::<usize>();
            BufferRange {
                buffer: stack,
                elements: start..end,
            }
        });
        places.collect()
    }

    fn name_and_shape(&mut self, weight: ValueId) -> (String, Vec<usize>) {
        if self.shard_of(weight).is_none() {
            let operand = self.value(weight);
            let buffer = &self.plan.buffers[operand.buffer];
            return (buffer.name.clone(), buffer.shape.clone());
        }
        let parameter = &self.request.function.parameters[self.request.function.numbers[&weight]];
        let value = self.program.value(weight);
        let shape = match value.elements() == parameter.elements {
            true => value.shape.clone(),
            false => vec![parameter.elements], // first read as a view
        };
        (parameter.name.clone(), shape)
    }
}
