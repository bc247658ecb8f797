//! Values and the operands that hold them.

use super::super::buffer::{Category, Location};
use super::super::op::BufferRange;
use super::super::traced::Parameter;
use super::{Lower, sub_range};
use crate::Result;
use crate::graph::{self, Source, ValueId};
use crate::ops::lowering::converted;
use crate::ops::strided;
use candle_core::DType;

impl Lower<'_> {
    pub(super) fn temporary(&mut self, name: &str, shape: &[usize], dtype: DType) -> BufferRange {
        let category = Category::Temporary;
        let id = self.plan.arena(name, shape, dtype, category);
        self.plan.whole(id)
    }

    /// Allocates scratch memory for one call.
    pub(super) fn scratch(&mut self, shape: &[usize], dtype: DType) -> BufferRange {
        let name = match dtype {
            DType::U32 => "workspace",
            _ => "scratch",
        };
        let id = self.plan.arena(name, shape, dtype, Category::Scratch);
        self.plan.whole(id)
    }

    /// Returns the operand for a value that a node computes: a new buffer, or the plan's output.
    pub(super) fn make(&mut self, value: ValueId, name: &str, shape: &[usize]) -> BufferRange {
        if let Some(place) = &self.places[value.0]
            && self.plan.buffers[place.buffer].location == Location::Output
        {
            return place.clone();
        }
        let dtype = self.program.value(value).dtype;
        let place = self.temporary(name, shape, dtype);
        self.places[value.0] = Some(place.clone());
        place
    }

    /// Makes the output be computed directly in the plan's output buffer, if it is a full result of an op.
    pub(super) fn place_output(&mut self) {
        let program = self.program.clone();
        let output = &program.outputs[0];
        if output.view.is_none() && program.maker(output.value).is_some() {
            self.places[output.value.0] = Some(self.output_buffer());
        }
    }

    /// Returns the output in the plan's output buffer, copying it there if necessary.
    pub(super) fn placed_output(&mut self) -> BufferRange {
        let output = self.program.outputs[0].clone();
        let made = self.read(&output);
        if self.plan.buffers[made.buffer].location == Location::Output {
            return made;
        }
        let place = self.output_buffer();
        let writes = [("y", place.clone())];
        self.plan.call(converted(), [("x", made)], writes);
        place
    }

    fn output_buffer(&mut self) -> BufferRange {
        let (program, buffers) = (self.program.clone(), &mut self.plan.buffers);
        let output = &program.outputs[0];
        let (shape, dtype) = (program.shape_of(output), program.value(output.value).dtype);
        let (category, location) = (Category::Output, Location::Output);
        let id = buffers.add("output", shape, dtype, category, location);
        self.plan.whole(id)
    }

    /// Returns the operand that holds all of a value.
    pub(super) fn value(&mut self, id: ValueId) -> BufferRange {
        if let Some(weight) = self.program.copied(id) {
            let dtype = self.program.value(id).dtype;
            return self.copy_of(&self.program.weights_of(weight), dtype);
        }
        if self.shard_of(id).is_some() {
            let dtype = self.program.value(id).dtype;
            return self.gathered(&[id], dtype);
        }
        if let Some(operand) = &self.places[id.0] {
            return operand.clone();
        }
        let program = self.program.clone();
        let value = program.value(id);
        assert_ne!(
            value.source,
            Source::Node,
            "%{} is read before it is made",
            id.0
        );
        let (name, elements, category, location) = match self.request.function.numbers.get(&id) {
            Some(number) => {
                let Parameter { name, elements, .. } = &self.request.function.parameters[*number];
                let location = Location::Parameter(*number);
                (name.clone(), *elements, Category::Parameter, location)
            }
            None => {
                let name = argument_name(&value.source, id);
                self.arguments.push((id, None));
                let number = self.arguments.len() - 1;
                let is_input = matches!(value.source, Source::Input(_));
                let location =
                    match is_input && graph::is_meta(&self.request.function.tensors[id.0]) {
                        true => Location::Input(number),
                        false => Location::Argument(number),
                    };
                (name, self.elements_read(id), Category::Input, location)
            }
        };
        let shape = match value.elements() == elements {
            true => value.shape.clone(),
            false => vec![elements], // first read as a view
        };
        let buffers = &mut self.plan.buffers;
        let buffer = buffers.add(&name, &shape, value.dtype, category, location);
        let operand = self.plan.whole(buffer);
        self.places[id.0] = Some(operand.clone());
        operand
    }

    pub(super) fn elements_of(&mut self, id: ValueId) -> usize {
        match self.request.function.numbers.get(&id) {
            Some(number) => self.request.function.parameters[*number].elements,
            None => self.value(id).elements.len(),
        }
    }

    /// Returns how many elements of a value's storage are read. Later views may extend beyond the first one.
    fn elements_read(&self, id: ValueId) -> usize {
        let program = &self.program;
        let of_nodes = program
            .nodes
            .iter()
            .flat_map(|node| node.inputs.iter().chain(&node.extra_inputs));
        let reads = of_nodes.chain(&program.outputs);
        let reads = reads.filter(|operand| operand.value == id);
        let value = program.value(id);
        let ends = reads.map(|operand| match &operand.view {
            Some(view) => strided::end(view),
            None => value.elements(),
        });
        let read = ends.max().unwrap_or(0);
        match value.source {
            Source::Input(_) => read.max(value.elements()), // an input is always passed in full
            _ if program.is_stacked(id) => value.elements(),
            _ => read,
        }
    }

    /// Returns the elements of an operand in contiguous order: in place, or a copy.
    pub(super) fn read(&mut self, operand: &graph::ValueRef) -> BufferRange {
        let elements = self.program.value(operand.value).elements();
        let Some(view) = &operand.view else {
            return sub_range(&self.value(operand.value), 0, elements);
        };
        if view.shape.contains(&0) {
            return sub_range(&self.value(operand.value), 0, 0); // its offset may be beyond the value
        }
        if strided::is_contiguous(view) {
            let base = self.value(operand.value);
            return sub_range(&base, view.offset, view.shape.iter().product());
        }
        let key = (operand.value.0, view.clone());
        if let Some(copy) = self.dense.get(&key) {
            return copy.clone();
        }
        let value = self.program.value(operand.value);
        let (dtype, source) = (value.dtype, value.source.clone());
        // A parameter that is only read through views looks like a constant.
        let is_parameter = self.request.function.numbers.contains_key(&operand.value);
        if source == Source::Constant && !is_parameter {
            // Made contiguous once, when the plan's arguments are created.
            self.arguments.push((operand.value, Some(view.clone())));
            let (category, location) = (
                Category::Input,
                Location::Argument(self.arguments.len() - 1),
            );
            let name = argument_name(&source, operand.value);
            let buffers = &mut self.plan.buffers;
            let id = buffers.add(&name, &view.shape, dtype, category, location);
            let dense = self.plan.whole(id);
            self.dense.insert(key, dense.clone());
            return dense;
        }
        let copy = self.temporary("contiguous", &view.shape, dtype);
        let base = self.value(operand.value);
        let kernel = strided::gather(view.clone());
        let writes = [("y", copy.clone())];
        self.plan.call(kernel, [("x", base)], writes);
        self.dense.insert(key, copy.clone());
        copy
    }

    /// Returns a table of a constant, (rows, columns) in f32, rounded to `dtype`. The same constant has one table.
    pub(super) fn table(
        &mut self,
        name: &str,
        operand: &graph::ValueRef,
        dtype: DType,
    ) -> Result<BufferRange> {
        let mut known = self.tables.iter();
        let known = known.position(|((other, _), _)| other == operand);
        if let Some(number) = known {
            let mut buffers = self.plan.buffers.iter();
            let found = buffers.find(|(_, buffer)| buffer.location == Location::Table(number));
            if let Some((id, _)) = found {
                return Ok(self.plan.whole(id));
            }
        }
        let number = self.tables.len();
        let elements = self.request.function.table(operand, dtype)?;
        let shape = self.program.shape_of(operand).to_vec();
        self.tables.push(((operand.clone(), dtype), elements));
        let (category, location) = (Category::Input, Location::Table(number));
        let buffers = &mut self.plan.buffers;
        let id = buffers.add(name, &shape, DType::F32, category, location);
        Ok(self.plan.whole(id))
    }
}

fn argument_name(source: &Source, id: ValueId) -> String {
    match source {
        Source::Weight(name) | Source::Input(name) if !name.is_empty() => name.clone(),
        Source::Constant => format!("constant {}", id.0),
        _ => format!("weight {}", id.0),
    }
}
