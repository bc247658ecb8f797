//! What comes between backward and the optimizer where the loss was scaled and gradients are f16: f32 gradients in
//! their place.

use super::Replay;
use super::ledger::{Buffer, Key};
use crate::graph::{Room, Target};
use crate::memory::MemoryKind;
use candle_core::DType;

impl Replay<'_> {
    /// The graph goes, from `place` on. Then each gradient is divided by the scale into f32, one after another, from
    /// the first weight to the last; the f16 one goes when that is done.
    pub(super) fn unscale(&mut self, place: usize) {
        let in_f16 = self.graph.weights().any(|(id, _)| {
            let weight = self.graph.value(id);
            weight.tracked && weight.dtype == DType::F16
        });
        if !in_f16 {
            return;
        }
        let mut gradients: Vec<(Key, Buffer)> = Vec::new();
        for (key, buffer) in self.ledger.alive_from(place) {
            match buffer.kind == MemoryKind::Gradients {
                true => gradients.push((key, buffer)),
                false => self.ledger.give_back(key),
            }
        }
        // Backward has made them from the last to the first.
        for (key, half) in gradients.into_iter().rev() {
            self.ledger.give_back(key); // all of those alike but the last
            let last = self.ledger.take(Buffer { count: 1.0, ..half });
            self.ledger.take(Buffer { width: 4, ..half });
            if self.graph.target == Target::Cuda {
                // Widened before it is multiplied, and times 0 to find what is not finite.
                self.pass(Room {
                    what: "a gradient as it is unscaled",
                    formula: "of the largest",
                    elements: half.elements,
                    element_bytes: 4,
                });
            }
            self.ledger.give_back(last);
        }
    }
}
