//! Packs the two linear layers of SwiGLU or GeGLU: one matmul computes gate and up.

use super::{Program, Replacement};
use crate::graph::{Saved, Value};

pub(super) fn rewrite(program: &mut Program) {
    let mut replacements = Vec::new();
    for i in 0..program.nodes.len() {
        if !program.is_gated_linear(i) || program.nodes[i].saved.len() != 2 {
            continue;
        }
        let Some(packed) = program.packed(&[(i, 1), (i, 2)]) else {
            continue;
        };
        let mut by = program.nodes[i].clone();
        let gate = by.saved[0].value;
        let value = program.value(gate);
        let gate_up = Value {
            shape: vec![value.shape[0], packed.rows],
            ..value.clone()
        };
        by.saved = vec![Saved {
            name: "gate_up",
            value: program.add(gate_up, gate),
        }];
        by.inputs.splice(1.., [packed.weight]);
        by.extra_inputs = vec![packed.copy];
        by.needs_grad.splice(1.., [packed.needs_grad]);
        replacements.push(Replacement {
            nodes: vec![i],
            at: i,
            by,
        });
    }
    program.replace(replacements);
}
