//! What backward computes again, with the same bits, instead of finding it there.

use super::{Kind, Program};
use crate::graph::Target;
use crate::ops::swiglu_linear;
use candle_core::DType;

/// What is computed again beside the graph's checkpointed segments: the first nodes of each kind, so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recompute {
    /// In how many norms the sum that they read: what it is the sum of stays, of which the stream does anyway. On a GPU
    /// in half precision, where the branch takes half as much as the sum.
    pub sums: usize,
    /// In how many gated maps gate and up: half of what a transformer's block leaves, and half of its products.
    pub gates: usize,
}

impl Program {
    /// Has the first of each kind computed again. Returns how many there were.
    pub fn recompute(&mut self, wanted: Recompute) -> Recompute {
        let mut taken = Recompute::default();
        let mut passes_on = vec![false; self.values.len()]; // by value: a sum that does not stay
        for i in 0..self.nodes.len() {
            let is_gate = self.is_kernel(i, &swiglu_linear::INFO);
            let node = &mut self.nodes[i];
            if is_gate && taken.gates < wanted.gates {
                node.recomputes_kept = true;
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
