//! What a collective does to the buffers of all its ranks.

use crate::distributed::collective::{Collective, Reduce};
use crate::distributed::host::{HostBuffer, divide, reduce_onto};
use crate::kernels::cpu::simd::BLOCK;
use crate::kernels::cpu::{Real, Stored};
use std::ops::Range;

/// Reduces, for one dtype.
pub(super) type ReduceRange = unsafe fn(Reduce, &[HostBuffer], Range<usize>, &[HostBuffer]);

/// Does what the first rank calls, with the buffers of all that take part, in order. `reduce_range` is there for what
/// reduces.
///
/// # Safety
/// Nobody else uses the buffers, which have one size, that the ranks divide where they have parts, and one dtype, that
/// of `reduce_range`.
pub(super) unsafe fn exchange(
    collective: Collective,
    reduce_range: Option<ReduceRange>,
    buffers: &[HostBuffer],
) {
    let world_size = buffers.len();
    let elements = buffers.first().map_or(0, |buffer| buffer.elements);
    // SAFETY: ranges and parts of the buffers, which have one size and dtype.
    unsafe {
        match collective {
            Collective::AllReduce(reduce) => {
                if let Some(reduce_range) = reduce_range {
                    reduce_range(reduce, buffers, 0..elements, buffers);
                }
            }
            Collective::Reduce { reduce, root } => {
                if let Some(reduce_range) = reduce_range {
                    reduce_range(reduce, buffers, 0..elements, &[buffers[root]]);
                }
            }
            Collective::ReduceScatter(reduce) => {
                let part = elements / world_size;
                for (rank, buffer) in buffers.iter().enumerate() {
                    let range = rank * part..(rank + 1) * part;
                    if let Some(reduce_range) = reduce_range {
                        reduce_range(reduce, buffers, range, &[*buffer]);
                    }
                }
            }
            Collective::AllGather => {
                for (rank, from) in buffers.iter().enumerate() {
                    let parts = buffers.iter().map(|buffer| buffer.part(rank, world_size));
                    copy(from.part(rank, world_size), parts);
                }
            }
            Collective::Broadcast { root } => copy(buffers[root], buffers.iter().copied()),
            Collective::Send { .. } => copy(buffers[0], buffers.iter().copied()),
            Collective::Receive { .. } => copy(buffers[1], buffers.iter().copied()),
            Collective::Barrier => {}
        }
    }
}

/// # Safety
/// Nobody else uses the buffers, which have one size and dtype.
unsafe fn copy(from: HostBuffer, into: impl Iterator<Item = HostBuffer>) {
    for into in into {
        // SAFETY: the caller's promise.
        unsafe { into.copy_from(from.start) }
    }
}

/// Reduces a range of all buffers, in their order, and writes it to some of them. Half precision is rounded once.
///
/// # Safety
/// Nobody else uses the buffers, which have the range, and the dtype `T`.
pub(super) unsafe fn reduce_range<T: Stored>(
    reduce: Reduce,
    from: &[HostBuffer],
    range: Range<usize>,
    into: &[HostBuffer],
) {
    let mut wide = [[T::Wide::ZERO; BLOCK]; 2];
    for start in range.clone().step_by(BLOCK) {
        let length = BLOCK.min(range.end - start);
        let [reduced, x] = wide.each_mut().map(|block| &mut block[..length]);
        for (rank, buffer) in from.iter().enumerate() {
            // SAFETY: elements of the buffer.
            T::load(unsafe { &*buffer.slice(start, length) }, x);
            match rank {
                0 => reduced.copy_from_slice(x),
                _ => reduce_onto::<T>(reduce, reduced, x),
            }
        }
        if reduce == Reduce::Mean {
            divide::<T>(reduced, from.len());
        }
        for buffer in into {
            // SAFETY: as above.
            T::store(reduced, unsafe { &mut *buffer.slice(start, length) });
        }
    }
}
