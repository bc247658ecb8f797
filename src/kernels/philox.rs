//! Philox4x32-10: a counter-based random generator, whose bits are a function of a key and a counter.
//!
//! The bits are the same on every device and for any number of threads. Backward computes them again instead of saving
//! them. Streams with different counters do not overlap.
//!
//! Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3.

use std::array;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Words per counter.
const BLOCK: usize = 4;
/// Counters computed together: each of the four words fills a vector of 512 bits.
const LANES: usize = 16;
/// Words per call of [`Stream::words`].
pub(crate) const WORDS: usize = BLOCK * LANES;
/// Half words per call of [`Stream::halves`].
pub(crate) const HALVES: usize = 2 * WORDS;
/// Half words per counter.
pub(crate) const BLOCK_HALVES: usize = 2 * BLOCK;

/// A stream of random words. Each element of a tensor uses one word or half a word.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    /// The upper three words of the counter. Bits of the block number above 2^32 go to the first of them.
    counter: [u32; 3],
}

impl Stream {
    /// Returns the stream of a step and a site. `words` are seed, seed >> 32, step and micro-batch; `site` is under
    /// 2^24. The stream has 2^42 words.
    pub fn new(words: [u32; 4], site: u32) -> Self {
        let [seed, seed_high, step, micro_batch] = words;
        Self {
            key: [seed, seed_high],
            counter: [site << 8, step, micro_batch],
        }
    }

    /// Returns the stream of a seed and the hash of a name.
    pub fn named(seed: u64, hash: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            counter: [0, hash as u32, (hash >> 32) as u32],
        }
    }

    /// Returns the key and the upper three words of the counter, as the CUDA kernels expect them.
    #[cfg(feature = "cuda")]
    pub fn key_and_counter(&self) -> [u32; 5] {
        let ([k0, k1], [c0, c1, c2]) = (self.key, self.counter);
        [k0, k1, c0, c1, c2]
    }

    /// Returns the words from index `first` on, a multiple of 4.
    #[inline(always)]
    pub fn words(&self, first: usize) -> [u32; WORDS] {
        let block = |lane: usize| (first / BLOCK + lane) as u64;
        let lanes: [u64; LANES] = array::from_fn(block);
        let mut x = lanes.map(|block| block as u32);
        let mut y = lanes.map(|block| self.counter[0] | (block >> 32) as u32);
        let [mut z, mut w] = [[self.counter[1]; LANES], [self.counter[2]; LANES]];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            for (((x, y), z), w) in x.iter_mut().zip(&mut y).zip(&mut z).zip(&mut w) {
                let a = u64::from(*x) * u64::from(MULTIPLIERS[0]);
                let b = u64::from(*z) * u64::from(MULTIPLIERS[1]);
                *x = (b >> 32) as u32 ^ *y ^ key[0];
                *y = b as u32;
                *z = (a >> 32) as u32 ^ *w ^ key[1];
                *w = a as u32;
            }
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let mut words = [0; WORDS];
        for (lane, words) in words.as_chunks_mut().0.iter_mut().enumerate() {
            *words = [x[lane], y[lane], z[lane], w[lane]];
        }
        words
    }

    /// Returns the half words from index `first` on, a multiple of 8: of each word the lower, then the upper half.
    #[inline(always)]
    pub fn halves(&self, first: usize) -> [u16; HALVES] {
        let words = self.words(first / 2);
        let mut halves = [0; HALVES];
        for (pair, word) in halves.as_chunks_mut().0.iter_mut().zip(words) {
            *pair = [word as u16, (word >> 16) as u16];
        }
        halves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123's `kat_vectors`.
    #[test]
    fn known_answers() {
        let answer = |counter: [u32; 4], key: [u32; 2]| {
            let stream = Stream {
                key,
                counter: [counter[1], counter[2], counter[3]],
            };
            let words = stream.words(BLOCK * counter[0] as usize);
            [words[0], words[1], words[2], words[3]]
        };
        assert_eq!(
            answer([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            answer([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            answer(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn words_are_their_elements_wherever_a_call_begins() {
        let stream = Stream::new([1, 2, 3, 4], 5);
        let all: Vec<u32> = (0..4).flat_map(|i| stream.words(i * WORDS)).collect();
        for first in [4, 8, 60, 64, 100] {
            assert_eq!(stream.words(first), all[first..first + WORDS]);
        }
        let halves: Vec<u16> = all
            .iter()
            .flat_map(|w| [*w as u16, (w >> 16) as u16])
            .collect();
        for first in [0, 8, 120, 128] {
            assert_eq!(stream.halves(first), halves[first..first + HALVES]);
        }
        let beyond = 1 << 34; // the first block number of more than 32 bits
        assert_ne!(stream.words(beyond), stream.words(0));
    }
}
