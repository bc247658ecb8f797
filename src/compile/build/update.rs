//! Gradients and what becomes of them: their norm, and AdamW.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::{Accumulate, Op};
use super::super::plan::{Operand, Phase};
use super::Builder;
use candle_core::DType;

impl Builder<'_> {
    /// The gradient of a parameter, and whether the first product that it is made from adds to it. f32 whatever the
    /// precision.
    pub(super) fn gradient(&mut self, name: &str) -> (BufferId, Accumulate) {
        let (number, parameter) = self.parameter(name);
        let accumulate = match self.source.config.accumulation {
            1 => Accumulate::Never,
            _ => Accumulate::AfterFirst,
        };
        if let Some(gradient) = self.gradients[number] {
            return (gradient, accumulate);
        }
        let shape = self.buffers[parameter.index()].shape.clone();
        let home = Home::Arena { offset_bytes: 0 };
        let name = format!("gradient of {name}");
        let gradient = self.add(&name, &shape, DType::F32, Category::Gradient, home);
        self.gradients[number] = Some(gradient);
        if !self.source.config.optimizer_in_backward {
            self.kept.push(gradient);
        }
        (gradient, accumulate)
    }

    /// The gradient of `name` is complete, and nobody reads the parameter any more.
    pub(super) fn gradient_done(&mut self, name: &str) {
        if self.source.config.optimizer_in_backward {
            let (path, phase) = (self.path.clone(), self.phase);
            let (number, _) = self.parameter(name);
            self.adamw(number, None);
            (self.path, self.phase) = (path, phase);
        }
    }

    /// What follows when all gradients are there.
    pub(super) fn update(&mut self) {
        if self.source.config.optimizer_in_backward {
            return; // done
        }
        if self.source.config.loss_scaling {
            self.unscale();
        }
        let factor = self.source.config.clip_norm.map(|_| self.clip_factor());
        for number in 0..self.gradients.len() {
            self.adamw(number, factor);
        }
    }

    /// Gradients over the loss scale, and the end of the step where one of them is not finite.
    fn unscale(&mut self) {
        self.phase = Phase::Optimizer;
        self.path = "grad_scaler".into();
        let parameters = self.gradients.len();
        let finite = self.arena("finite", &[parameters], DType::U8, Category::Temporary);
        for number in 0..parameters {
            let Some(gradient) = self.gradients[number] else {
                continue;
            };
            let gradient = self.whole(gradient);
            let elements = gradient.elements.len();
            let is_finite = Operand {
                buffer: finite,
                elements: number..number + 1,
            };
            self.call_on(Op::Unscale { elements }, vec![], vec![gradient, is_finite]);
        }
        let first = self.arena("first not finite", &[1], DType::U32, Category::Temporary);
        self.kept.push(first);
        self.call(Op::CheckOverflow { parameters }, &[finite], &[first]);
    }

    /// The norm of all gradients, and what they are multiplied by: (2).
    fn clip_factor(&mut self) -> BufferId {
        self.phase = Phase::Clip;
        self.path = "clip_grad_norm".into();
        let parameters = self.gradients.len();
        let squares = self.arena("squares", &[parameters], DType::F64, Category::Temporary);
        for number in 0..parameters {
            let Some(gradient) = self.gradients[number] else {
                continue;
            };
            let elements = self.buffers[gradient.index()].elements();
            let gradient = self.whole(gradient);
            let square = Operand {
                buffer: squares,
                elements: number..number + 1,
            };
            self.call_on(Op::SumOfSquares { elements }, vec![gradient], vec![square]);
        }
        let factor = self.arena("norm and factor", &[2], DType::F64, Category::Temporary);
        self.kept.push(factor);
        self.call(Op::ClipFactor { parameters }, &[squares], &[factor]);
        factor
    }

    /// The update of parameter number `number`.
    fn adamw(&mut self, number: usize, factor: Option<BufferId>) {
        let Some(gradient) = self.gradients[number] else {
            return;
        };
        let parameters = self.buffers.iter();
        let Some(parameter) = parameters
            .clone()
            .position(|buffer| buffer.home == Home::Parameter(number))
        else {
            return;
        };
        let (name, shape) = {
            let parameter = &self.buffers[parameter];
            (parameter.name.clone(), parameter.shape.clone())
        };
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
            self.add(
                &format!("{state} of {name}"),
                &shape,
                DType::F32,
                category,
                home,
            )
        });
        self.phase = Phase::Optimizer;
        self.path = "adamw".into();
        let reads: Vec<BufferId> = [gradient].into_iter().chain(factor).collect();
        self.call(op, &reads, &[BufferId(parameter), exp_avg, exp_avg_sq]);
    }
}
