//! The calls of a node, as its lowering says.

use super::super::plan::{BufferRange, Phase};
use super::super::program::{Kind, Node, Program};
use super::gradients::Waiting;
use super::{Lower, no_planned_form, part};
use crate::Result;
use crate::graph::ValueId;
use crate::ops::lowering::{Accumulate, Calls, KernelCall, Named, Slot, converted};
use candle_core::DType;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// What a node's outputs are to be.
#[derive(Clone, Copy, PartialEq)]
enum Outputs {
    /// New ones, or where the plan gives them out.
    Made,
    /// Buffers that nothing else knows of.
    Apart,
}

/// The calls of one node that are being written, and where their operands lie.
struct Writing {
    program: Rc<Program>,
    node: usize,
    calls: Calls,
    /// What is no value of the program, or not where that lies.
    places: HashMap<Slot, BufferRange>,
    /// By input: where its gradient goes, if calls add to what is there, or to a parameter's.
    sums: HashMap<usize, Sum>,
}

/// What makes a gradient.
#[derive(Clone, Copy, PartialEq)]
enum MadeBy {
    Product,
    /// Several, each of some rows.
    Products,
    Other,
}

/// Where a call adds a gradient, and whether it does.
#[derive(Clone)]
struct Sum {
    place: BufferRange,
    accumulate: Accumulate,
}

impl Writing {
    fn new(program: &Rc<Program>, node: usize, calls: Calls) -> Self {
        Self {
            program: program.clone(),
            node,
            calls,
            places: HashMap::new(),
            sums: HashMap::new(),
        }
    }

    fn node(&self) -> &Node {
        &self.program.nodes[self.node]
    }

    /// Where an operand lies. `None` for what the node has not: an op that keeps nothing, say, as attention of no
    /// queries does not.
    fn find(&mut self, lower: &mut Lower<'_>, slot: Slot) -> Option<BufferRange> {
        if let Some(place) = self.places.get(&slot) {
            return Some(place.clone());
        }
        let program = self.program.clone();
        let node = &program.nodes[self.node];
        let place = match slot {
            Slot::Input(i) => return Some(lower.read(node.inputs.get(i)?)),
            Slot::Read(i) => return Some(lower.read(node.reads.get(i)?)),
            Slot::Output => return Some(lower.value(node.output)),
            Slot::Second => return Some(lower.value(node.second?)),
            Slot::Kept(i) => return Some(lower.value(node.kept.get(i)?.value)),
            Slot::Part(i) => {
                let (slot, elements) = self.calls.parts[i].clone();
                let all = self.find(lower, slot)?;
                return Some(part(&all, elements.start, elements.len()));
            }
            Slot::Table(i) => {
                let dtype = program.value(node.inputs[0].value).dtype;
                return lower.table("angles", node.reads.get(i)?, dtype).ok();
            }
            Slot::Scratch(i) => {
                let scratch = &self.calls.scratch[i];
                match scratch.name {
                    Some(name) => lower.temporary(name, &scratch.shape, scratch.dtype),
                    None => lower.scratch(&scratch.shape, scratch.dtype),
                }
            }
            Slot::Gradient(i) => {
                let x = node.inputs.get(i)?;
                let dtype = program.value(x.value).dtype;
                lower.temporary("gradient", program.shape_of(x), dtype)
            }
            Slot::SecondGradient => {
                let second = program.value(node.second?);
                lower.temporary("gradient", &second.shape, second.dtype)
            }
            Slot::StepLoss => lower.step_loss(),
            Slot::OutputGradient => return None,
        };
        self.places.insert(slot, place.clone());
        Some(place)
    }

    /// Writes a call.
    fn call(&mut self, lower: &mut Lower<'_>, call: KernelCall) -> Result<()> {
        let mut all = |slots: &Named<Slot>| slots.try_map(|slot| self.find(lower, *slot));
        let operands = all(&call.reads).zip(all(&call.writes));
        let (reads, writes) = operands.ok_or_else(|| lower.refused(self.node()))?;
        lower.plan.call(call.kernel, reads, writes);
        Ok(())
    }

    /// The inputs whose gradients a call writes, each with the operand that it is.
    fn gradients_of(&self, call: &KernelCall) -> Vec<(&'static str, usize)> {
        let writes = call.writes.entries().iter();
        let gradients = writes.filter_map(|(name, slot)| match self.calls.base(*slot) {
            Slot::Gradient(input) => Some((*name, input)),
            _ => None,
        });
        gradients.collect()
    }

    /// Has a call add to what is there of the gradients that it makes, where it can: a parameter's, or one of a value
    /// that nothing else reads.
    fn add_up(&mut self, lower: &mut Lower<'_>, call: &mut KernelCall) {
        for (operand, input) in self.gradients_of(call) {
            if call.kernel.accumulate(operand) != Some(Accumulate::Never) {
                continue; // it cannot, or adds to what the node has made
            }
            let by = match (call.kernel.is_product(), &self.node().kind) {
                (false, _) => MadeBy::Other,
                (true, Kind::Head(_)) => MadeBy::Products,
                (true, _) => MadeBy::Product,
            };
            if !self.sums.contains_key(&input)
                && let Some(sum) = lower.sum_of(self.node(), input, by)
            {
                self.places.insert(Slot::Gradient(input), sum.place.clone());
                self.sums.insert(input, sum);
            }
            if let Some(sum) = self.sums.get(&input) {
                call.kernel = call.kernel.clone().accumulating(operand, sum.accumulate);
            }
        }
    }
}

/// By node: whether its backward makes its output again, where the gradient of that lay.
pub(super) fn remade(program: &Program) -> Vec<bool> {
    let remakes = |node: &Node| {
        let signature = program.signature(node, Some([true; 2]));
        node.kind.backward(&signature).is_some_and(|calls| {
            let mut written = calls.calls.iter().flat_map(|call| call.writes.iter());
            written.any(|slot| *slot == Slot::OutputGradient)
        })
    };
    program.nodes.iter().map(remakes).collect()
}

impl Lower<'_> {
    fn refused(&self, node: &Node) -> crate::Error {
        let what = match node.composed {
            true => " composed of candle's own ops",
            false => "",
        };
        let path = match node.path.is_empty() {
            true => node.op.to_string(),
            false => format!("{}/{}", node.path, node.op),
        };
        no_planned_form(self.job.function.op, node.op, &path, what)
    }

    /// Writes a node's forward.
    pub(super) fn forward_of(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let signature = program.signature(node, None);
        // A sum that is made in another segment than this one, which is recomputed, is there.
        let is_made = |second: ValueId| self.places[second.0].is_some();
        let calls = match (&node.kind, node.second) {
            (Kind::Norm(norm), Some(second)) if is_made(second) => norm.of_sum().again(&signature),
            _ => match node.kind.forward(&signature) {
                Some(calls) => calls,
                None => return Err(self.refused(node)),
            },
        };
        if let Some((read, check)) = calls.check {
            self.checks.push((node.reads[read].value, check));
        }
        if let Some((input, _)) = calls.same.first() {
            return self.pass_on(node, *input);
        }
        self.write_forward(i, calls, Outputs::Made)?;
        if node.recomputes_kept {
            for kept in &node.kept {
                self.places[kept.value.0] = None;
            }
        }
        Ok(())
    }

    /// The output is an input's elements.
    fn pass_on(&mut self, node: &Node, input: usize) -> Result<()> {
        let x = self.read(&node.inputs[input]);
        match self.places[node.output.0].is_none() {
            true => self.places[node.output.0] = Some(x),
            // What the plan gives out.
            false => {
                let y = self.value(node.output);
                self.plan.call(converted(), [("x", x)], [("y", y)]);
            }
        }
        Ok(())
    }

    fn write_forward(&mut self, i: usize, calls: Calls, outputs: Outputs) -> Result<Writing> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let mut writing = Writing::new(&program, i, calls);
        let is_loss = writing.calls.calls.iter().any(|call| {
            let mut written = call.writes.iter();
            written.any(|slot| *slot == Slot::StepLoss)
        });
        for value in node.made().filter(|_| !is_loss) {
            let kept = node.kept.iter().find(|kept| kept.value == value);
            let is_second = Some(value) == node.second;
            if is_second && self.places[value.0].is_some() {
                continue; // made elsewhere
            }
            let name = match kept {
                Some(kept) => kept.name,
                None if is_second => "sum",
                None => node.op,
            };
            let shape = &program.value(value).shape;
            match outputs {
                Outputs::Made => {
                    self.make(value, name, shape);
                }
                Outputs::Apart => {
                    let place = self.temporary(name, shape, program.value(value).dtype);
                    let slot = match node.kept.iter().position(|kept| kept.value == value) {
                        Some(kept) => Slot::Kept(kept),
                        None if value == node.output => Slot::Output,
                        None => Slot::Second,
                    };
                    writing.places.insert(slot, place);
                }
            }
        }
        for mut call in std::mem::take(&mut writing.calls.calls) {
            if is_loss {
                self.plan.phase = match writing.gradients_of(&call).is_empty() {
                    true => Phase::Loss,
                    false => Phase::LossGradient,
                };
                writing.add_up(self, &mut call);
            }
            writing.call(self, call)?;
        }
        if is_loss {
            self.hand_on(&mut writing, &BTreeSet::new());
        }
        Ok(writing)
    }

    /// A node's output once more, from what stays for backward, where that is cheap.
    fn again(&mut self, value: ValueId) -> Result<Option<BufferRange>> {
        let program = self.program.clone();
        let Some(i) = program.maker(value) else {
            return Ok(None);
        };
        let node = &program.nodes[i];
        let Some(calls) = node.kind.again(&program.signature(node, None)) else {
            return Ok(None);
        };
        self.plan.path.clone_from(&node.path);
        let mut writing = self.write_forward(i, calls, Outputs::Apart)?;
        Ok(writing.find(self, Slot::Output))
    }

    /// Computes what a node keeps again, if it has not stayed: before its output's gradient comes.
    pub(super) fn keep_again(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let is_there = |value: ValueId| self.places[value.0].is_some();
        let stays = !node.recomputes_kept || node.kept.iter().all(|kept| is_there(kept.value));
        if stays || !program.is_wanted(node.output) {
            return Ok(());
        }
        let Some(mut calls) = node.kind.forward(&program.signature(node, None)) else {
            return Err(self.refused(node));
        };
        calls.calls.retain(|call| {
            let mut written = call.writes.iter();
            written.all(|slot| *slot != Slot::Output)
        });
        let mut writing = Writing::new(&program, i, calls);
        for (input, x) in node.inputs.iter().enumerate() {
            if x.view.is_none()
                && self.is_remade(x.value)
                && let Some(place) = self.again(x.value)?
            {
                writing.places.insert(Slot::Input(input), place);
            }
        }
        self.plan.path.clone_from(&node.path);
        for kept in &node.kept {
            self.make(kept.value, kept.name, &program.value(kept.value).shape);
        }
        for call in std::mem::take(&mut writing.calls.calls) {
            writing.call(self, call)?;
        }
        Ok(())
    }

    /// Writes a node's backward, and hands the gradients of its inputs on.
    pub(super) fn backward_of(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let of_second = |lower: &Self| node.second.is_some_and(|x| lower.gradients.has(x));
        let given = [self.gradients.has(node.output), of_second(self)];
        if given == [false; 2] {
            return Ok(());
        }
        let signature = program.signature(node, Some(given));
        let Some(mut calls) = node.kind.backward(&signature) else {
            return Err(self.refused(node));
        };
        // What no one reads: a gradient of tokens' weights that are frozen, say.
        let parts = calls.parts.clone();
        let base = |slot: Slot| match slot {
            Slot::Part(i) => parts[i].0,
            slot => slot,
        };
        calls.calls.retain(|call| {
            let of_inputs = |slot: &Slot| match base(*slot) {
                Slot::Gradient(input) => node.passes[input],
                _ => true,
            };
            call.writes.iter().any(of_inputs)
        });
        let mut writing = Writing::new(&program, i, calls);
        self.take_gradients(&mut writing, given);
        let waiting = self.calls_that_wait(&writing);
        for mut call in std::mem::take(&mut writing.calls.calls) {
            let inputs = writing.gradients_of(&call);
            if inputs.iter().any(|(_, input)| waiting.contains(input)) {
                self.have_wait(&mut writing, call);
                continue;
            }
            writing.add_up(self, &mut call);
            let is_second = |(name, slot): &(&'static str, Slot)| {
                (*slot == Slot::SecondGradient).then_some(*name)
            };
            if given[1]
                && let Some(name) = call.writes.entries().iter().find_map(is_second)
            {
                call.kernel = call.kernel.accumulating(name, Accumulate::Always);
            }
            let remakes = call.writes.iter().any(|slot| *slot == Slot::OutputGradient);
            writing.call(self, call)?;
            if remakes && let Some(place) = writing.find(self, Slot::OutputGradient) {
                let path = self.plan.path.clone();
                self.remade(node.output, place)?;
                self.plan.path = path;
            }
        }
        // Until all that reads them is written.
        if let (Some(second), Some(place)) =
            (node.second, writing.places.get(&Slot::SecondGradient))
        {
            self.gradients.set(second, place.clone());
        }
        self.hand_on(&mut writing, &waiting);
        self.gradients.take(node.output);
        if let Some(second) = node.second {
            self.gradients.take(second);
        }
        Ok(())
    }

    /// Where the gradients of a node's outputs lie: those that its calls write over are its own.
    fn take_gradients(&mut self, writing: &mut Writing, given: [bool; 2]) {
        let node = &writing.program.clone().nodes[writing.node];
        let written = writing
            .calls
            .calls
            .iter()
            .flat_map(|call| call.writes.iter());
        let written: Vec<Slot> = written.copied().collect();
        let outputs = [
            (Slot::OutputGradient, Some(node.output)),
            (Slot::SecondGradient, node.second),
        ];
        for ((slot, value), given) in outputs.into_iter().zip(given) {
            let Some(value) = value.filter(|_| given) else {
                continue;
            };
            let place = match written.contains(&slot) {
                true => self.take_own(value),
                false => self.gradients.get(value),
            };
            if let Some(place) = place {
                writing.places.insert(slot, place);
            }
        }
    }

    /// The inputs that are parameters whose gradients wait: those of which a call reads a value that is made again
    /// later.
    fn calls_that_wait(&self, writing: &Writing) -> BTreeSet<usize> {
        let node = writing.node();
        let mut waiting = BTreeSet::new();
        for call in &writing.calls.calls {
            let gradients = writing.gradients_of(call);
            let reads_remade = call.reads.iter().any(|slot| match slot {
                Slot::Input(x) => self.is_remade(node.inputs[*x].value),
                _ => false,
            });
            let is_trained = |input: usize| self.is_trained(&node.inputs[input]);
            let are_trained = gradients.iter().all(|(_, input)| is_trained(*input));
            let alone = gradients.len() == call.writes.entries().len();
            if reads_remade && are_trained && alone {
                waiting.extend(gradients.into_iter().map(|(_, input)| input));
            }
        }
        waiting
    }

    /// Has a call that makes a parameter's gradient wait until what it reads is made again.
    fn have_wait(&mut self, writing: &mut Writing, call: KernelCall) {
        let program = writing.program.clone();
        let i = writing.node;
        let node = &program.nodes[i];
        let is_remade = |lower: &Self, slot: &Slot| match slot {
            Slot::Input(x) => lower.is_remade(node.inputs[*x].value),
            _ => false,
        };
        let mut later = Writing::new(&program, i, Calls::default());
        let (mut x, mut buffers) = (None, Vec::new());
        for slot in call.reads.iter() {
            if is_remade(self, slot) {
                if let Slot::Input(input) = slot {
                    x = Some(node.inputs[*input].value);
                }
            } else if let Some(place) = writing.find(self, *slot) {
                buffers.push(place.buffer);
                later.places.insert(*slot, place);
            }
        }
        let Some(x) = x else {
            return;
        };
        let inputs = writing.gradients_of(&call);
        let mut call = call;
        self.wait(Waiting {
            x,
            buffers,
            part: self.plan.part,
            write: Box::new(move |lower: &mut Lower<'_>| {
                lower.plan.path.clone_from(&later.node().path);
                later.add_up(lower, &mut call);
                later.call(lower, call)?;
                for (_, input) in inputs {
                    let weight = later.node().inputs[input].value;
                    lower.gradient_done(&later.program.weights_of(weight));
                }
                Ok(())
            }),
        });
    }

    /// Where a call that can add makes the gradient of an input: a parameter's, or in what is there of the input's.
    fn sum_of(&mut self, node: &Node, input: usize, by: MadeBy) -> Option<Sum> {
        if !node.passes[input] {
            return None;
        }
        let operand = &node.inputs[input];
        let dtype = self.program.value(operand.value).dtype;
        let is_wide = matches!(dtype, DType::F32 | DType::F64);
        if self.is_trained(operand) {
            if !is_wide && by == MadeBy::Other {
                return None;
            }
            let weights = self.program.weights_of(operand.value);
            let factors = self.program.value(node.inputs[0].value).dtype;
            let dtype = match (by, dtype) {
                (MadeBy::Product, _) => self.dtype_of_product_gradient(&weights, factors),
                (MadeBy::Products | MadeBy::Other, DType::F64) => DType::F64,
                (MadeBy::Products | MadeBy::Other, _) => DType::F32,
            };
            let (place, accumulate) = self.gradient_of_weights(&weights, dtype);
            return Some(Sum { place, accumulate });
        }
        // As where `y = x + W x`: what is there is read again, for the weight's gradient.
        let shares = self
            .gradients
            .get(operand.value)
            .zip(self.gradients.get(node.output));
        let is_shared = shares.is_some_and(|(before, dy)| before.buffer == dy.buffer);
        if operand.view.is_some() || is_shared {
            return None;
        }
        let place = self.take_own(operand.value)?;
        let accumulate = Accumulate::Always;
        Some(Sum { place, accumulate })
    }

    /// Hands the gradients of a node's inputs on, but those that wait.
    fn hand_on(&mut self, writing: &mut Writing, waiting: &BTreeSet<usize>) {
        let program = writing.program.clone();
        let node = &program.nodes[writing.node];
        for (input, operand) in node.inputs.iter().enumerate() {
            if !node.passes[input] || waiting.contains(&input) {
                continue;
            }
            if writing.sums.contains_key(&input) && self.is_trained(operand) {
                self.gradient_done(&program.weights_of(operand.value));
            } else if let Some(gradient) = writing.places.remove(&Slot::Gradient(input)) {
                self.contribute(operand, gradient);
            }
            let same = writing.calls.same.iter().find(|(same, _)| *same == input);
            if let Some(place) = same.and_then(|(_, slot)| writing.places.get(slot)) {
                self.contribute(operand, place.clone());
            }
        }
    }
}
