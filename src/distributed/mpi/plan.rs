//! Plans of a collective's MPI calls: in pieces, since MPI counts in 31 bits.

use crate::distributed::Shard;
use crate::distributed::collective::Collective;
use crate::distributed::host::HostBuffer;
use std::ops::Range;

/// One MPI call, and the parts of the buffer that it reads and writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// The collective. Every reduction runs as an all-reduce.
    pub(super) call: Collective,
    pub(super) from: HostBuffer,
    /// Empty on a rank that receives nothing.
    pub(super) into: HostBuffer,
}

/// Plans the calls. Every rank's plan has the same steps.
pub(super) fn plan(
    collective: Collective,
    buffer: HostBuffer,
    Shard { rank, world_size }: Shard,
    piece: usize,
) -> Vec<Step> {
    let nothing = buffer.range(0..0);
    let step = |call, from, into| Step { call, from, into };
    let pieces = |of: HostBuffer| ranges(of.elements, piece).map(move |range| of.range(range));
    let broadcast = |root, of| {
        pieces(of).map(move |own| match rank == root {
            true => step(Collective::Broadcast { root }, own, nothing),
            false => step(Collective::Broadcast { root }, nothing, own),
        })
    };
    match collective {
        // Open MPI's own reduce-scatter sums everything on one rank and is slower. An all-reduce also has the same bits
        // for all reductions.
        Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::Reduce { .. } => {
            pieces(buffer)
                .map(|own| step(collective, own, own))
                .collect()
        }
        Collective::AllGather if (1..=piece).contains(&buffer.elements) => {
            let part = buffer.part(rank, world_size);
            vec![step(Collective::AllGather, part, buffer)]
        }
        Collective::AllGather => (0..world_size)
            .flat_map(|root| broadcast(root, buffer.part(root, world_size)))
            .collect(),
        Collective::Broadcast { root } => broadcast(root, buffer).collect(),
    }
}

fn ranges(elements: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..elements).step_by(piece);
    starts.map(move |start| start..elements.min(start + piece))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::Reduce;
    use candle_core::DType;

    /// Returns the calls of a rank's plan with their number of elements, and the ranges that it receives.
    fn planned(
        collective: Collective,
        elements: usize,
        (rank, world_size): (usize, usize),
        piece: usize,
    ) -> (Vec<(Collective, usize)>, Vec<Range<usize>>) {
        let buffer = HostBuffer {
            start: std::ptr::null_mut(),
            elements,
            dtype: DType::U8,
        };
        let (mut calls, mut received) = (Vec::new(), Vec::new());
        for Step { call, from, into } in plan(collective, buffer, Shard { rank, world_size }, piece)
        {
            calls.push((call, from.elements.max(into.elements)));
            if into.elements > 0 {
                let start = into.start as usize;
                received.push(start..start + into.elements);
            }
        }
        (calls, received)
    }

    #[test]
    fn ranks_make_the_same_calls_and_miss_nothing() {
        for world_size in [1, 2, 3, 5] {
            for piece in [1, 3, 7, 1000] {
                for elements in [0, 1, 2, 8].map(|part| part * world_size) {
                    let root = world_size - 1;
                    for collective in [
                        Collective::AllReduce(Reduce::Sum),
                        Collective::ReduceScatter(Reduce::Mean),
                        Collective::AllGather,
                        Collective::Broadcast { root },
                        Collective::Reduce {
                            reduce: Reduce::Mean,
                            root,
                        },
                    ] {
                        let of = |rank| planned(collective, elements, (rank, world_size), piece);
                        for rank in 0..world_size {
                            let (calls, received) = of(rank);
                            assert_eq!(calls, of(0).0);
                            let is_small = |(_, elements): &(Collective, usize)| {
                                (1..=piece).contains(elements)
                            };
                            assert!(calls.iter().all(is_small));
                            let own = match collective {
                                Collective::AllGather if elements > piece => elements / world_size,
                                Collective::Broadcast { root } if rank == root => elements,
                                _ => 0,
                            };
                            let received: usize = received.iter().map(Range::len).sum();
                            assert_eq!(received, elements - own);
                        }
                    }
                }
            }
        }
    }
}
