//! The loss of a step: its requirements, its mean over micro-batches, and the start of backward.

use super::super::buffer::{Category, Location};
use super::super::config::PlanKind;
use super::super::op::{BufferRange, Phase};
use super::super::traced::Parameter;
use super::Lower;
use crate::ops::Reduction;
use crate::ops::arithmetic::lowering::zeros;
use crate::ops::cross_entropy::lowering::{gradient_of_mean, mean_of};
use crate::ops::lowering::{Accumulate, converted};
use crate::optim::MissingGradients;
use crate::probe::Path;
use crate::{Error, Result};
use candle_core::DType;

impl Lower<'_> {
    /// Checks the first output. It must be a float. With a backward it must be made by an op, with a graph. The loss of
    /// a step must be a scalar.
    pub(super) fn check_output(&self) -> Result<()> {
        let op = self.request.function.op;
        let is_loss = self.request.kind == PlanKind::TrainStep;
        let refuse = |got: String| {
            let (expected, hint) = match is_loss {
                true => (
                    "a scalar f32 (or f64 on the CPU) made by an op",
                    "return ops::mean or a cross-entropy of the model's output; ops::cast makes it f32",
                ),
                false => (
                    "an output in a float dtype, made by an op if its gradient is passed",
                    "return the output of an op of tallow::ops",
                ),
            };
            Err(Error::shape(op, got).must_be(expected, hint))
        };
        let Some(output) = self.program.outputs.first() else {
            return refuse("no output".into());
        };
        let shape = self.program.shape_of(output);
        let value = self.program.value(output.value);
        let takes = match value.dtype {
            DType::F32 => true,
            DType::F64 => !self.is_on_gpu(),
            DType::BF16 | DType::F16 => !is_loss,
            _ => false,
        };
        let is_one = shape.iter().product::<usize>() == 1;
        if (is_loss && !is_one) || !takes {
            return refuse(format!("{shape:?} in {}", value.dtype.as_str()));
        }
        if !self.request.kind.has_backward() {
            return Ok(());
        }
        if !output.tracked {
            return refuse("an output without a graph".into());
        }
        match self.program.maker(output.value) {
            Some(_) => Ok(()),
            None => refuse("a tensor not made by an op".into()),
        }
    }

    /// Starts backward from the output's gradient that is passed to a run. Returns the output, which is kept after the
    /// run.
    pub(super) fn begin_with_output_gradient(&mut self) -> BufferRange {
        let program = self.program.clone();
        let (output, gradient) = (&program.outputs[0], &program.outputs[1]);
        let [mut out, d_out] = [output, gradient].map(|x| self.read(x));
        if !self.plan.buffers[out.buffer].is_in_arena() {
            let value = program.value(output.value);
            let copy = self.temporary("output", program.shape_of(output), value.dtype);
            let writes = [("y", copy.clone())];
            self.plan.call(converted(), [("x", out)], writes);
            out = copy;
        }
        let category = Category::Output;
        self.plan.buffers.set_category(out.buffer, category);
        self.plan.kept.push(out.buffer);
        self.contribute(output, d_out);
        out
    }

    /// Returns the mean of all micro-batches' losses, (1) in f64. If it is not written yet, writes it and the gradient
    /// of this micro-batch's loss.
    pub(super) fn mean_loss(&mut self) -> Result<BufferRange> {
        if let Some(mean) = &self.mean_loss {
            return Ok(mean.clone());
        }
        self.plan.phase = Phase::Loss;
        (self.plan.path, self.plan.module) = ("loss".into(), Path::ROOT);
        let output = self.program.outputs[0].clone();
        let loss = self.read(&output);
        let divisor = match self.request.function.reduction {
            Reduction::Mean => self.request.config.accumulation,
            Reduction::Sum | Reduction::None => 1, // the run's loss gradient includes the divisor
        };
        let mean = self.step_loss();
        let kernel = mean_of(divisor, None, Accumulate::AfterFirst);
        let writes = [("loss", mean.clone())];
        self.plan.call(kernel, [("losses", loss)], writes);
        let dtype = self.program.value(output.value).dtype;
        let gradient = self.temporary("gradient of the loss", &[1], dtype);
        let writes = [("dloss", gradient.clone())];
        self.plan.phase = Phase::LossGradient;
        self.plan.call(gradient_of_mean(divisor), [], writes);
        self.contribute(&output, gradient);
        Ok(mean)
    }

    /// Returns a buffer for the mean loss of the step, (1) in f64, which is read after the run.
    pub(super) fn step_loss(&mut self) -> BufferRange {
        let mean = self.temporary("loss", &[1], DType::F64);
        self.plan.kept.push(mean.buffer);
        self.mean_loss = Some(mean.clone());
        mean
    }

    /// Plans the parameters that the loss does not depend on, as their groups require: an error, no update, or an
    /// update from zeros.
    pub(super) fn complete_gradients(&mut self) -> Result<()> {
        let function = self.request.function;
        for (number, parameter) in function.parameters.iter().enumerate() {
            if self.weights.gradients[number].is_some() {
                continue;
            }
            let missing = parameter.rule.missing_gradients();
            self.unreached.push((number, missing));
            match missing {
                MissingGradients::Error => {
                    return Err(Error::MissingGradient {
                        op: function.op,
                        parameter: parameter.name.clone(),
                    });
                }
                MissingGradients::Skip => {}
                MissingGradients::Zero => self.zero_gradient(number),
            }
        }
        self.round_gradients();
        Ok(())
    }

    /// Rounds the gradients of half-precision parameters, which matmuls sum in f32, to the parameters' dtype.
    fn round_gradients(&mut self) {
        for (number, parameter) in self.request.function.parameters.iter().enumerate() {
            let Some(gradient) = self.weights.gradients[number].clone() else {
                continue;
            };
            let is_half = matches!(parameter.dtype, DType::BF16 | DType::F16);
            if is_half && self.plan.buffers[gradient.buffer].dtype != parameter.dtype {
                let name = format!("gradient of {}", parameter.name);
                let rounded = self.temporary(&name, &[parameter.elements], parameter.dtype);
                let writes = [("y", rounded.clone())];
                let reads = [("x", gradient.clone())];
                self.plan.call(converted(), reads, writes);
                if self.request.config.accumulation > 1 {
                    self.plan.kept.push(gradient.buffer); // the next micro-batch adds to it
                }
                self.weights.gradients[number] = Some(rounded);
            }
        }
    }

    /// Writes a gradient of zeros for a parameter or this rank's shard of it.
    fn zero_gradient(&mut self, number: usize) {
        let function = self.request.function;
        let Parameter {
            name,
            elements,
            dtype,
            ..
        } = &function.parameters[number];
        let elements = match self
            .request
            .config
            .ranks
            .fully_sharded()
            .and(self.request.config.ranks.shard())
        {
            Some(own) => own.part(*elements).len(),
            None => *elements,
        };
        let (location, buffers) = (Location::Parameter(number), &mut self.plan.buffers);
        if !buffers
            .iter()
            .any(|(_, buffer)| buffer.location == location)
        {
            buffers.add(name, &[elements], *dtype, Category::Parameter, location);
        }
        let gradient = format!("gradient of {name}");
        let gradient = buffers.arena(&gradient, &[elements], *dtype, Category::Gradient);
        let gradient = self.plan.whole(gradient);
        self.plan.path = "missing_gradients".into();
        self.plan.call(zeros(), [], [("y", gradient.clone())]);
        self.weights.gradients[number] = Some(gradient);
        if self.request.config.optimizer_in_backward {
            self.weights.late.push(number);
        }
    }
}
