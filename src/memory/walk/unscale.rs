//! What comes between backward and the optimizer where the loss was scaled and gradients are f16: f32 gradients in
//! their place.

use super::ledger::Key;
use super::{Buffer, Walk};
use crate::memory::Holds;

impl Walk {
    /// The graph goes, from `place` on. Then each gradient is divided by the scale into f32, one after another, from
    /// the embedding to the head; the f16 one goes when that is done.
    pub(super) fn unscale(&mut self, place: usize) {
        let is_gradient = |buffer: &Buffer| buffer.holds == Holds::Gradients;
        let mut gradients: Vec<(Key, Buffer)> = Vec::new();
        for key in self.ledger.keys_from(place) {
            match self.ledger.get(key) {
                Some(buffer) if is_gradient(&buffer) => gradients.push((key, buffer)),
                _ => self.ledger.give_back(key),
            }
        }
        // Backward has made them from the head to the embedding.
        for (key, half) in gradients.into_iter().rev() {
            self.ledger.give_back(key); // all of those alike but the last
            let last = self.ledger.take(Buffer { count: 1.0, ..half });
            self.ledger.take(Buffer { width: 4, ..half });
            if self.on_card() {
                // Widened before it is multiplied, and times 0 to find what is not finite.
                let what = "a gradient as it is unscaled";
                let passing = self.take(Holds::Scratch, what, half.size, 4);
                self.ledger.give_back(passing);
            }
            self.ledger.give_back(last);
        }
    }
}
