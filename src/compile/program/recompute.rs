//! Selects the tensors that backward recomputes instead of saving them. The results have the same bits.

use super::{Kind, Program};
use crate::graph::Target;
use candle_core::DType;

/// The number of nodes of each kind that are recomputed in addition to checkpointed segments, the first ones first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recompute {
    /// Norms whose sum is recomputed from stream and branch. On a GPU in half precision: the branch needs half the
    /// memory of the sum, and the stream is saved anyway.
    pub sums: usize,
    /// SwiGLU and GeGLU nodes whose gate and up are recomputed: half of what a transformer block saves, and half of its
    /// matmul FLOPs.
    pub gates: usize,
}

impl Program {
    /// Marks the first nodes of each kind as recomputed. Returns how many there are.
    pub fn recompute(&mut self, wanted: Recompute) -> Recompute {
        let mut taken = Recompute::default();
        let mut passes_on = vec![false; self.values.len()]; // by value: whether it is a sum that is recomputed
        for i in 0..self.nodes.len() {
            let is_gate = self.is_gated_linear(i);
            let node = &mut self.nodes[i];
            if is_gate && taken.gates < wanted.gates {
                node.recomputes_saved = true;
                taken.gates += 1;
            }
            let (Kind::Norm(norm), Some(sum)) = (&mut node.kind, node.second) else {
                continue;
            };
            let is_half = self.values[node.output.0].dtype != DType::F32;
            let can_pass =
                self.target == Target::Cuda && is_half && !passes_on[node.inputs[0].value.0];
            if can_pass && taken.sums < wanted.sums {
                norm.sum_stays = false;
                passes_on[sum.0] = true;
                taken.sums += 1;
            }
        }
        taken
    }
}
