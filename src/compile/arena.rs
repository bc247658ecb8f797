//! Placement of buffers in the arena: buffers that are never live together share memory.

use super::buffer::{Buffer, Location};

/// The alignment of every buffer in the arena: what a GPU's matmuls are fastest with. (A cache line and the widest
/// vector register of a CPU have 64 bytes.)
pub const ALIGNMENT_BYTES: u64 = 256;

/// Assigns an offset to every arena buffer. Returns the size of the arena, in bytes.
///
/// Greedy by size: the largest buffer first, each at the lowest offset that is free during its lifetime. Large buffers
/// determine the size; small ones fill the gaps.
pub(super) fn place(buffers: &mut [Buffer]) -> u64 {
    let mut order: Vec<usize> = (0..buffers.len())
        .filter(|&i| buffers[i].is_in_arena())
        .collect();
    // Among equal sizes the one that is needed first, so that the order is deterministic.
    order.sort_by_key(|&i| {
        (
            std::cmp::Reverse(buffers[i].bytes()),
            buffers[i].live.start,
            i,
        )
    });
    let mut placed: Vec<usize> = Vec::new(); // sorted by offset
    let mut arena_bytes = 0;
    for i in order {
        let size = taken_bytes(&buffers[i]);
        let mut offset_bytes = 0;
        for &other in &placed {
            let Some(taken) = buffers[other].arena_range() else {
                continue;
            };
            if !overlap(&buffers[other], &buffers[i]) {
                continue;
            }
            if taken.start >= offset_bytes + size {
                break; // it fits in front of this one, and all others have higher offsets
            }
            offset_bytes = offset_bytes.max(taken.start + taken_bytes(&buffers[other]));
        }
        buffers[i].location = Location::Arena { offset_bytes };
        let at = placed.partition_point(|&other| {
            buffers[other].arena_range().map(|range| range.start) <= Some(offset_bytes)
        });
        placed.insert(at, i);
        arena_bytes = arena_bytes.max(offset_bytes + size);
    }
    arena_bytes
}

/// Returns a buffer's size rounded up to the alignment, in bytes.
pub(super) fn taken_bytes(buffer: &Buffer) -> u64 {
    buffer.bytes().next_multiple_of(ALIGNMENT_BYTES)
}

pub(super) fn overlap(a: &Buffer, b: &Buffer) -> bool {
    a.live.start < b.live.end && b.live.start < a.live.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::buffer::Category;
    use candle_core::DType;
    use proptest::prelude::*;

    fn buffer(elements: usize, live: std::ops::Range<usize>) -> Buffer {
        Buffer {
            name: String::new(),
            shape: vec![elements],
            dtype: DType::F32,
            category: Category::Temporary,
            location: Location::Arena { offset_bytes: 0 },
            live,
        }
    }

    /// Checks that no two buffers that are live together share a byte, and that the arena ends with the last buffer.
    fn check(buffers: &[Buffer], arena_bytes: u64) {
        let mut end = 0;
        for (i, a) in buffers.iter().enumerate() {
            let range = a.arena_range().unwrap();
            assert!(range.start.is_multiple_of(ALIGNMENT_BYTES));
            end = end.max(range.start + taken_bytes(a));
            for b in &buffers[..i] {
                let other = b.arena_range().unwrap();
                let share = range.start < other.end && other.start < range.end;
                assert!(!(share && overlap(a, b)), "{a:?} and {b:?}");
            }
        }
        assert_eq!(arena_bytes, end);
    }

    #[test]
    fn one_after_another_takes_the_largest_alone() {
        let mut buffers = vec![buffer(10, 0..1), buffer(1000, 1..2), buffer(100, 2..5)];
        let arena_bytes = place(&mut buffers);
        assert_eq!(arena_bytes, 4096); // 4000, rounded up to the alignment
        check(&buffers, arena_bytes);
    }

    #[test]
    fn a_small_one_fits_between() {
        let mut buffers = vec![
            buffer(1600, 0..9),
            buffer(768, 0..3),
            buffer(768, 3..9),
            buffer(64, 1..2),
        ];
        let arena_bytes = place(&mut buffers);
        assert_eq!(arena_bytes, 4 * (1600 + 768 + 64));
        check(&buffers, arena_bytes);
    }

    proptest! {
        #[test]
        fn never_two_at_one_place(sizes in prop::collection::vec((1usize..5000, 0usize..40, 1usize..20), 1..80)) {
            let mut buffers: Vec<Buffer> = sizes
                .into_iter()
                .map(|(elements, start, length)| buffer(elements, start..start + length))
                .collect();
            let arena_bytes = place(&mut buffers);
            check(&buffers, arena_bytes);
            // At least the bytes that are live during the busiest call, at most all buffers end to end.
            let alive = |call: usize| -> u64 {
                let alive = buffers.iter().filter(|buffer| buffer.live.contains(&call));
                alive.map(taken_bytes).sum()
            };
            let busiest = (0..60).map(alive).max().unwrap();
            prop_assert!(arena_bytes >= busiest);
            prop_assert!(arena_bytes <= buffers.iter().map(taken_bytes).sum());
        }
    }
}
