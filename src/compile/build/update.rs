//! Gradients, and when their parameters are updated.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::Accumulate;
use super::super::update::Update;
use super::Builder;
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
            .plan
            .buffers
            .add(&name, &shape, dtype, Category::Gradient, home);
        for (number, _, operand) in self.parts(&parameters, gradient) {
            self.gradients[number] = Some(operand);
        }
        if !self.source.config.optimizer_in_backward {
            self.plan.kept.push(gradient);
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
            Some(gradient) => self.plan.buffers[gradient.buffer].shape.len() == 1,
            None => false,
        };
        let (vectors, matrices): (Vec<usize>, Vec<usize>) =
            waiting.into_iter().partition(is_vector);
        self.waiting = vectors;
        self.update_in_backward(&matrices);
    }

    fn update_in_backward(&mut self, numbers: &[usize]) {
        let (path, phase) = (self.plan.path.clone(), self.plan.phase);
        for number in numbers {
            self.update_of_all().adamw(*number, None);
        }
        (self.plan.path, self.plan.phase) = (path, phase);
    }

    fn update_of_all(&mut self) -> Update<'_> {
        Update {
            on_card: self.is_on_card(),
            plan: &mut self.plan,
            gradients: &self.gradients,
            copies: &self.copies,
        }
    }

    /// What follows when all gradients are there.
    pub(super) fn update(&mut self) {
        if self.source.config.optimizer_in_backward {
            for number in std::mem::take(&mut self.waiting) {
                self.update_of_all().adamw(number, None);
            }
            return;
        }
        let (scales, clips) = (
            self.source.config.loss_scaling,
            self.source.config.clip_norm.is_some(),
        );
        self.update_of_all().run(scales, clips);
    }
}
