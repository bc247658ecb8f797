//! Collectives: operations that all ranks run together.

use super::Shard;
use std::ops::Range;

/// How the numbers of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// Their sum over the number of ranks.
    Mean,
    /// The largest.
    Max,
}

/// An operation that all ranks run at once, in place, on a buffer of `elements` numbers on each of them.
///
/// Of reduce-scatter and all-gather the buffer is in as many parts of one size as there are ranks; rank r's is part r.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    /// All numbers of all ranks reduced, on every rank.
    AllReduce(Reduce),
    /// All numbers of all ranks reduced, on `root` alone; the others' hold nothing of use afterwards.
    Reduce {
        /// How.
        reduce: Reduce,
        /// The rank.
        root: usize,
    },
    /// Each rank's part reduced over all ranks; the other parts hold nothing of use afterwards.
    ReduceScatter(Reduce),
    /// Each rank's part, on every rank.
    AllGather,
    /// Copies what `root` has to every rank.
    Broadcast { root: usize },
}

impl Collective {
    /// Collectives that give every rank all of a tensor of which each has its [part](Shard::part), by elements.
    pub(crate) fn gathering(world_size: usize, elements: usize) -> Vec<(Self, Range<usize>)> {
        let from = |root| Self::Broadcast { root };
        Self::by_parts(world_size, elements, Self::AllGather, from)
    }

    /// Collectives that give each rank the mean over all of its [part](Shard::part) of a tensor, by elements;
    /// the other parts hold nothing of use afterwards.
    pub(crate) fn scattering(world_size: usize, elements: usize) -> Vec<(Self, Range<usize>)> {
        let reduce = Reduce::Mean;
        let to = |root| Self::Reduce { reduce, root };
        Self::by_parts(world_size, elements, Self::ReduceScatter(reduce), to)
    }

    /// `whole` of parts of one size, else `each`.
    fn by_parts(
        world_size: usize,
        elements: usize,
        whole: Self,
        each: impl Fn(usize) -> Self,
    ) -> Vec<(Self, Range<usize>)> {
        let parts: Vec<Range<usize>> = Shard::parts(world_size, elements).collect();
        if parts.iter().all(|part| part.len() == parts[0].len()) {
            return vec![(whole, 0..elements)];
        }
        let parts = parts.into_iter().enumerate();
        let parts = parts.filter(|(_, part)| !part.is_empty());
        parts.map(|(rank, part)| (each(rank), part)).collect()
    }

    /// How it reduces, if it does.
    pub(super) fn reduce(self) -> Option<Reduce> {
        match self {
            Self::AllReduce(reduce) | Self::ReduceScatter(reduce) | Self::Reduce { reduce, .. } => {
                Some(reduce)
            }
            _ => None,
        }
    }

    /// The name in errors and reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::Reduce { .. } => "reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
        }
    }
}
