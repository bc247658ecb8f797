//! What dropout takes beside elements.

use super::philox::Stream;

/// Which elements stay, and what they are multiplied by.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Of a probability p from 0 to under 1.
    pub probability: f64,
    /// Which of a step's masks, under 2^24.
    pub site: u32,
}

impl Dropout {
    /// An element stays if its random word is at least this: p 2^32.
    pub fn threshold(&self) -> u32 {
        (self.probability * 2f64.powi(32)) as u32
    }

    /// 1 / (1 - p).
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// The random words of the step that `key` says.
    pub(crate) fn stream(&self, key: &[u32]) -> Stream {
        let mut words = [0; 4];
        words.copy_from_slice(key);
        Stream::new(words, self.site)
    }
}
