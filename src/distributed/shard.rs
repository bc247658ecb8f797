//! A rank's share of a tensor or model that is divided among the ranks of a job.

use crate::{Error, Result};
use std::ops::Range;

/// Alignment of parts, in elements: 16 bytes in half precision, with which exchanges are fastest.
const PART_ELEMENTS: usize = 8;

/// A rank and the number of ranks, which determine the rank's part of a tensor.
///
/// [`part`](Self::part) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
}

impl Shard {
    pub(crate) const SINGLE: Self = Self {
        rank: 0,
        world_size: 1,
    };

    /// Checks that the rank is less than the number of ranks.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn validate(&self) -> Result<()> {
        match self.rank < self.world_size {
            true => Ok(()),
            false => Err(Error::config("Shard", "rank", self.rank).must_be(
                format!("under the number of ranks, {}", self.world_size),
                "ranks count from 0",
            )),
        }
    }

    /// Returns this rank's part of a tensor with this many elements, which is divided in the order of the ranks. Parts
    /// have equal sizes, except that those of the last ranks may be smaller or empty. If `rank` is `world_size` or
    /// more, the part is empty.
    ///
    /// ```
    /// use tallow::distributed::Shard;
    ///
    /// let parts = [0, 1, 2].map(|rank| Shard { rank, world_size: 3 }.part(50));
    /// assert_eq!(parts, [0..24, 24..48, 48..50]); // sizes are multiples of 8: 16 bytes in bf16
    /// ```
    pub fn part(&self, elements: usize) -> Range<usize> {
        if self.rank >= self.world_size {
            return elements..elements;
        }
        let each = elements.div_ceil(self.world_size);
        let each = each.checked_next_multiple_of(PART_ELEMENTS);
        let each = each.unwrap_or(usize::MAX);
        let begin = |rank: usize| rank.saturating_mul(each).min(elements);
        begin(self.rank)..begin(self.rank + 1)
    }

    /// Returns the [parts](Self::part) of all ranks.
    pub(crate) fn parts(world_size: usize, elements: usize) -> impl Iterator<Item = Range<usize>> {
        (0..world_size).map(move |rank| Self { rank, world_size }.part(elements))
    }

    /// Returns the rank that owns each of these parameters, given as name and number of elements.
    ///
    /// Each parameter, in the order of names, goes to the rank with the fewest elements so far. A block's parameters
    /// are then spread over all ranks, and owners do not depend on the order of `parameters`.
    pub(crate) fn owners<'a>(
        world_size: usize,
        parameters: impl Iterator<Item = (&'a str, usize)>,
    ) -> Vec<usize> {
        let parameters: Vec<(&str, usize)> = parameters.collect();
        let mut order: Vec<usize> = (0..parameters.len()).collect();
        order.sort_by_key(|number| parameters[*number].0);
        let ranks = world_size.min(parameters.len()); // ranks after these own nothing
        let mut elements = vec![0; ranks];
        let mut owners = vec![0; parameters.len()];
        for number in order {
            let fewest = (0..ranks).min_by_key(|rank| elements[*rank]);
            owners[number] = fewest.unwrap_or(0);
            elements[owners[number]] += parameters[number].1;
        }
        owners
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_have_as_much_whatever_the_order() {
        let parameters = [("b", 10), ("c", 4), ("a", 6), ("e", 4), ("d", 2)];
        let owners = Shard::owners(2, parameters.into_iter());
        // a: 0 (6), b: 1 (10), c: 0 (10), d: 0 (12), e: 1 (14)
        assert_eq!(owners, [1, 0, 0, 1, 0]);
        let reversed = Shard::owners(2, parameters.into_iter().rev());
        assert!(reversed.iter().rev().eq(&owners));
        assert_eq!(Shard::owners(8, parameters.into_iter()), [1, 2, 0, 4, 3]);
        assert_eq!(
            Shard::owners(usize::MAX, parameters.into_iter()),
            Shard::owners(8, parameters.into_iter())
        );
        assert!(Shard::owners(3, [].into_iter()).is_empty());
    }

    /// No rank and no number of elements is too large or too small.
    #[test]
    fn every_rank_has_a_part() {
        let part = |rank, world_size, elements| Shard { rank, world_size }.part(elements);
        assert_eq!(part(0, 0, 50), 50..50);
        assert_eq!(part(3, 3, 50), 50..50);
        assert_eq!(part(usize::MAX, usize::MAX, 50), 50..50);
        assert_eq!(part(0, 1, usize::MAX), 0..usize::MAX);
        assert_eq!(part(usize::MAX - 1, usize::MAX, 50), 50..50);
        let halves = [0, 1].map(|rank| part(rank, 2, usize::MAX));
        assert_eq!(halves[0].end, halves[1].start);
        assert_eq!(halves[1].end, usize::MAX);
    }
}
