//! Gradients and what becomes of them: their norm, and AdamW.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::{Accumulate, Op};
use super::super::plan::{Operand, Phase};
use super::Builder;
use crate::kernels::workspace;
use candle_core::DType;

impl Builder<'_> {
    /// The gradients of parameters, one under the other, and whether the first product that they are made from adds to them.
    /// f32 whatever the precision.
    pub(super) fn gradient(&mut self, names: &[String]) -> (BufferId, Accumulate) {
        self.gradient_in(names, DType::F32)
    }

    /// The gradients of weights that one product makes. With the optimizer in backward nobody but the update sees them: on a
    /// card they are then rounded to bf16 where the product's factors are, as autocast rounds them there, which is 4 bytes a
    /// parameter less to move. (f16 has not their range.)
    pub(super) fn product_gradient(&mut self, names: &[String]) -> (BufferId, Accumulate) {
        let passing = self.is_on_card() && self.source.config.optimizer_in_backward;
        match self.lower_dtype() {
            DType::BF16 if passing => self.gradient_in(names, DType::BF16),
            _ => self.gradient_in(names, DType::F32),
        }
    }

    fn gradient_in(&mut self, names: &[String], dtype: DType) -> (BufferId, Accumulate) {
        let parameters: Vec<_> = names.iter().map(|name| self.parameter(name)).collect();
        let accumulate = match self.source.config.accumulation {
            1 => Accumulate::Never,
            _ => Accumulate::AfterFirst,
        };
        if let Some(gradient) = &self.gradients[parameters[0].0] {
            return (gradient.buffer, accumulate);
        }
        let shape = self.stacked(&parameters);
        let home = Home::Arena { offset_bytes: 0 };
        let name = format!("gradient of {}", names.join(" and "));
        let gradient = self
            .buffers
            .add(&name, &shape, dtype, Category::Gradient, home);
        for (number, _, operand) in self.parts(&parameters, gradient) {
            self.gradients[number] = Some(operand);
        }
        if !self.source.config.optimizer_in_backward {
            self.kept.push(gradient);
        }
        (gradient, accumulate)
    }

    /// The gradients of `names` are complete, and nobody reads the parameters any more.
    pub(super) fn gradient_done(&mut self, names: &[String]) {
        if !self.source.config.optimizer_in_backward {
            return;
        }
        let numbers = names.iter().map(|name| self.parameter(name).0);
        let numbers: Vec<usize> = numbers.collect();
        match self.is_on_card() {
            true => self.waiting.extend(numbers),
            false => self.update_in_backward(&numbers),
        }
    }

    /// The backward of a block, or of the head, is over: on a card one launch updates its matrices. Vectors wait until the end,
    /// where one launch updates those of all blocks.
    pub(super) fn update_matrices(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let is_vector = |number: &usize| match &self.gradients[*number] {
            Some(gradient) => self.buffers[gradient.buffer].shape.len() == 1,
            None => false,
        };
        let (vectors, matrices): (Vec<usize>, Vec<usize>) =
            waiting.into_iter().partition(is_vector);
        self.waiting = vectors;
        self.update_in_backward(&matrices);
    }

    fn update_in_backward(&mut self, numbers: &[usize]) {
        let (path, phase) = (self.path.clone(), self.phase);
        for number in numbers {
            self.adamw(*number, None);
        }
        (self.path, self.phase) = (path, phase);
    }

    /// What follows when all gradients are there.
    pub(super) fn update(&mut self) {
        if self.source.config.optimizer_in_backward {
            for number in std::mem::take(&mut self.waiting) {
                self.adamw(number, None);
            }
            return;
        }
        let mut factor = None;
        if self.source.config.loss_scaling {
            factor = self.unscale();
        }
        if self.source.config.clip_norm.is_some() {
            factor = Some(self.clip_factor());
        }
        for number in 0..self.gradients.len() {
            self.adamw(number, factor);
        }
    }

    /// Gradients over the loss scale, and the end of the step where one of them is not finite; on a card, what keeps the
    /// updates from happening then.
    fn unscale(&mut self) -> Option<BufferId> {
        self.phase = Phase::Optimizer;
        self.path = "grad_scaler".into();
        let parameters = self.gradients.len();
        let (found, dtype) = match self.is_on_card() {
            true => ("not finite", DType::U32),
            false => ("finite", DType::U8),
        };
        let finite = self.arena(found, &[parameters], dtype, Category::Temporary);
        for number in 0..parameters {
            let Some(gradient) = self.gradients[number].clone() else {
                continue;
            };
            let elements = gradient.elements.len();
            let is_finite = Operand {
                buffer: finite,
                elements: number..number + 1,
            };
            self.call_on(Op::Unscale { elements }, vec![], vec![gradient, is_finite]);
        }
        let first = self.arena("first not finite", &[1], DType::U32, Category::Temporary);
        self.kept.push(first);
        let factor = self.is_on_card().then(|| self.factor());
        let writes: Vec<BufferId> = [first].into_iter().chain(factor).collect();
        self.call(Op::CheckOverflow { parameters }, &[finite], &writes);
        factor
    }

    /// The norm, and what gradients are multiplied by.
    fn factor(&mut self) -> BufferId {
        let words = if self.is_on_card() { 3 } else { 2 };
        let factor = self.arena("norm and factor", &[words], DType::F64, Category::Temporary);
        self.kept.push(factor);
        factor
    }

    /// The norm of all gradients, and what they are multiplied by: (2).
    fn clip_factor(&mut self) -> BufferId {
        self.phase = Phase::Clip;
        self.path = "clip_grad_norm".into();
        let parameters = self.gradients.len();
        let squares = self.arena("squares", &[parameters], DType::F64, Category::Temporary);
        let all = self.gradients.iter().flatten();
        let all_chunks = all.map(|gradient| workspace::chunks(gradient.elements.len()));
        let all_chunks = [all_chunks.sum()];
        let chunks = self
            .is_on_card()
            .then(|| self.arena("chunks", &all_chunks, DType::F64, Category::Scratch));
        let mut chunk = 0;
        for number in 0..parameters {
            let Some(gradient) = self.gradients[number].clone() else {
                continue;
            };
            let elements = gradient.elements.len();
            let square = Operand {
                buffer: squares,
                elements: number..number + 1,
            };
            let first = chunk;
            chunk += workspace::chunks(elements);
            let chunks = chunks.map(|buffer| Operand {
                buffer,
                elements: first..chunk,
            });
            let writes = [square].into_iter().chain(chunks).collect();
            self.call_on(Op::SumOfSquares { elements }, vec![gradient], writes);
        }
        let factor = self.factor();
        self.call(Op::ClipFactor { parameters }, &[squares], &[factor]);
        factor
    }

    /// The update of parameter number `number`.
    fn adamw(&mut self, number: usize, factor: Option<BufferId>) {
        let Some(gradient) = self.gradients[number].clone() else {
            return;
        };
        let home = Home::Parameter(number);
        let Some((parameter, buffer)) = self.buffers.iter().find(|(_, b)| b.home == home) else {
            return;
        };
        let (name, shape) = (buffer.name.clone(), buffer.shape.clone());
        let op = Op::AdamW {
            parameter: number,
            elements: shape.iter().product(),
        };
        let category = Category::OptimizerState;
        let [exp_avg, exp_avg_sq] = [
            ("exp_avg", Home::ExpAvg(number)),
            ("exp_avg_sq", Home::ExpAvgSq(number)),
        ]
        .map(|(state, home)| {
            self.buffers.add(
                &format!("{state} of {name}"),
                &shape,
                DType::F32,
                category,
                home,
            )
        });
        self.phase = Phase::Optimizer;
        self.path = "adamw".into();
        let factor = factor.map(|factor| self.whole(factor));
        let reads = [gradient].into_iter().chain(factor).collect();
        let written = [parameter, exp_avg, exp_avg_sq].map(|id| self.whole(id));
        let copy = self.copies[number].clone().filter(|_| self.is_on_card());
        let writes = written.into_iter().chain(copy).collect();
        self.call_on(op, reads, writes);
    }
}
