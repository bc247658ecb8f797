//! SwiGLU with its two maps, `silu(x W1^T) * x W3^T`. Backward recomputes its output where the gradient of that lay,
//! and the gradients of gate and up where these lay.

use super::super::plan::BufferRange;
use super::form::{Form, Forms};
use super::linear::{self, Map, Maps};
use super::program::Program;
use super::recompute::Choice;
use super::{Job, Lower, place_of};
use crate::Result;
use crate::graph::ValueId;
use crate::ops::lowering::Named;
use crate::ops::swiglu;

struct Gated {
    path: String,
    maps: Maps,
    /// x W1^T and x W3^T, (N, F) each, or both as one, (N, 2 F).
    gate_up: [ValueId; 2],
    packed: bool,
    /// (N, F).
    output: ValueId,
    rows: usize,
    width: usize,
    /// Whether backward recomputes gate and up.
    recompute: bool,
}

impl Gated {
    /// Where gate and up lie: two operands, or one.
    fn places(&self, lower: &mut Lower<'_>) -> Named<BufferRange> {
        let names: &[_] = if self.packed {
            &["gate_up"]
        } else {
            &["gate", "up"]
        };
        let places = names.iter().zip(&self.gate_up);
        let places = places.map(|(name, value)| (*name, lower.value(*value)));
        places.collect::<Vec<_>>().into()
    }
}

impl Form for Gated {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn inputs(&self) -> Vec<ValueId> {
        self.maps.inputs()
    }

    fn copy_weights(&self, lower: &mut Lower<'_>) {
        self.maps.copy_weights(lower);
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        self.maps.forward(lower)?;
        lower.plan.path.clone_from(&self.path);
        let output = lower.make(self.output, "gated", &[self.rows, self.width]);
        let kernel = match self.packed {
            true => swiglu::packed(self.width),
            false => swiglu::gated(),
        };
        let gate_up = self.places(lower);
        lower.plan.call(kernel, gate_up, [("y", output)]);
        if self.recompute {
            for value in self.gate_up {
                lower.places[value.0] = None;
            }
        }
        Ok(())
    }

    fn remakes_output(&self) -> bool {
        true
    }

    fn prepare(&self, lower: &mut Lower<'_>) -> Result<()> {
        if lower.places[self.gate_up[0].0].is_some() || !lower.program.is_wanted(self.output) {
            return Ok(());
        }
        let maker = lower.maker(self.maps.x.value);
        let recomputed = maker.and_then(|form| form.recomputed_output(lower));
        let x = match recomputed {
            Some(x) => x,
            None => lower.read(&self.maps.x),
        };
        self.maps.products(lower, &x);
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let Some(dy) = lower.take_own(self.output) else {
            return Ok(());
        };
        let kernel = match self.packed {
            true => swiglu::packed_in_place(self.width),
            false => swiglu::gated_in_place(),
        };
        let gate_up = self.places(lower);
        let in_place = Named::from([("dy", dy.clone())]).and(gate_up.clone());
        lower.plan.call(kernel, [], in_place);
        lower.remade(self.output, dy);
        for (value, gradient) in self.gate_up.iter().zip(gate_up.iter().cycle()) {
            lower.gradients.set(*value, gradient.clone());
        }
        self.maps.backward(lower)
    }
}

/// The nodes that are a gate with its maps.
pub(super) fn find(program: &Program<'_>, job: &Job<'_>, choice: &Choice, forms: &mut Forms) {
    for (i, node) in program.nodes.iter().enumerate() {
        let is_gated = node.op == "swiglu_linear" && !node.composed;
        if !is_gated || node.kept.len() != 2 {
            continue;
        }
        let gate_up = [0, 1].map(|kept| node.kept[kept].value);
        let path = place_of(node);
        let maps = [0, 1].map(|number| {
            let map = Map {
                path: path.clone(),
                input: 1 + number,
                bias: None,
                output: gate_up[number],
            };
            (node, map)
        });
        let weights = [1, 2].map(|input| (node, input));
        let dtype = program.graph.value(node.output).dtype;
        let packed = linear::can_be_packed(program, job, &weights, dtype);
        let kept = program.graph.value(gate_up[0]);
        let form = Gated {
            maps: Maps::new(program, job, &maps, packed),
            gate_up,
            packed,
            output: node.output,
            rows: kept.shape[0],
            width: kept.shape[1],
            recompute: choice.takes_gate(),
            path,
        };
        forms.add(i, [], form);
    }
}
