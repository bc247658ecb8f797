//! Collectives: operations that all ranks run together.

use super::Shard;
use std::ops::Range;

/// The operation that combines the elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Mean,
    /// The maximum.
    Max,
}

/// An operation that all ranks run together, in place, on a buffer of `elements` numbers on each of them.
///
/// For reduce-scatter and all-gather the buffer is divided into as many equal parts as there are ranks; part r belongs
/// to rank r.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    /// Reduces all elements over all ranks, with the result on every rank.
    AllReduce(Reduce),
    /// Reduces all elements over all ranks, with the result on `root`; the buffers of other ranks are undefined
    /// afterwards.
    Reduce {
        /// The operation.
        reduce: Reduce,
        /// The rank with the result.
        root: usize,
    },
    /// Reduces each rank's part over all ranks, with the result on that rank; the other parts are undefined afterwards.
    ReduceScatter(Reduce),
    /// Copies each rank's part to every rank.
    AllGather,
    /// Copies the buffer of `root` to every rank.
    Broadcast { root: usize },
}

impl Collective {
    /// Returns the collectives, with their elements, that gather a tensor on all ranks, of which each has its
    /// [part](Shard::part).
    pub(crate) fn gathering(world_size: usize, elements: usize) -> Vec<(Self, Range<usize>)> {
        let from = |root| Self::Broadcast { root };
        Self::by_parts(world_size, elements, Self::AllGather, from)
    }

    /// Returns the collectives, with their elements, that give each rank the mean over all ranks of its
    /// [part](Shard::part) of a tensor; the other parts are undefined afterwards.
    pub(crate) fn scattering(world_size: usize, elements: usize) -> Vec<(Self, Range<usize>)> {
        let reduce = Reduce::Mean;
        let to = |root| Self::Reduce { reduce, root };
        Self::by_parts(world_size, elements, Self::ReduceScatter(reduce), to)
    }

    /// Returns `whole` if all parts have the same size, else `each` for every part.
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

    /// Returns the reduction, if it is one.
    pub(super) fn reduce(self) -> Option<Reduce> {
        match self {
            Self::AllReduce(reduce) | Self::ReduceScatter(reduce) | Self::Reduce { reduce, .. } => {
                Some(reduce)
            }
            _ => None,
        }
    }

    /// Returns the name in errors and reports.
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
