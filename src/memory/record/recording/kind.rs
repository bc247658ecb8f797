//! What a block is there for, by where it was taken and how long it stayed.

use super::MemoryKind;
use super::block::{Block, Circumstances, PhaseSpan};
use crate::model::HEAD;
use crate::ops::{self, WEIGHT_CAST};

/// The rules, of which the first that applies holds; a label comes before all of them.
///
/// - Taken before the recording, or outside of every phase: of no kind.
/// - Taken by a weight's cast: a weight cast.
/// - Forward: scratch, if given back in the same call of the same op; else a cross-entropy's, and those of the product
///   in [`TransformerLM`](crate::model::TransformerLM)'s head, are logits, all others activations. Without a graph they
///   come and go, and are activations all the same.
/// - Backward: a gradient, if it is there when backward is done; else scratch: gradients on their way.
/// - Optimizer: its state, if it is there when the optimizer is done; else scratch.
pub(super) fn of(block: &Block, of: Circumstances, phases: &[PhaseSpan]) -> MemoryKind {
    let Some(phase) = of.phase.map(|number| &phases[number]) else {
        return MemoryKind::Other;
    };
    let outlives = block
        .given_back_at
        .is_none_or(|event| event > phase.ends_at);
    let names = block.path.names();
    let op = names.last().map_or("", String::as_str);
    if op == WEIGHT_CAST {
        return MemoryKind::WeightCasts;
    }
    match (phase.name, outlives) {
        ("forward", _) if of.call.is_some() && of.call == of.given_back_in => MemoryKind::Scratch,
        ("forward", _) => {
            let is_head = op == ops::LINEAR && names.iter().any(|name| name == HEAD);
            match is_head || ops::is_cross_entropy(op) {
                true => MemoryKind::Logits,
                false => MemoryKind::Activations,
            }
        }
        ("backward", true) => MemoryKind::Gradients,
        ("optimizer", true) => MemoryKind::Optimizer,
        ("backward" | "optimizer", false) => MemoryKind::Scratch,
        _ => MemoryKind::Other,
    }
}
