//! Turn-taking of tasks that add to the same tile of dq.

use super::Tiles;
use std::sync::atomic::{AtomicUsize, Ordering};

/// For every tile of queries, the tile of keys that adds to its dq next. Tiles of keys add in order, whichever thread
/// is first.
///
/// There is no deadlock if tasks start in the order of their tiles of keys: the task that is waited for has started,
/// and itself waits only for earlier ones.
pub(super) struct AllTurns {
    /// (heads of q, tiles of queries).
    next: Vec<AtomicUsize>,
    q_tiles: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Turns<'a> {
    next: &'a [AtomicUsize],
    q_tiles: usize,
}

/// Polls of the counter before the thread yields; a tile of queries needs about ten microseconds.
const SPINS: usize = 10_000;

impl AllTurns {
    /// Creates the turns; the tile of queries that starts at `query` begins with the tile of keys `first(head, query)`.
    pub(super) fn new(
        heads: usize,
        queries: usize,
        tiles: &Tiles,
        first: impl Fn(usize, usize) -> usize,
    ) -> Self {
        let q_tiles = queries.div_ceil(tiles.backward_q_tile);
        let next = (0..heads * q_tiles).map(|i| {
            let (head, q_tile) = (i / q_tiles, i % q_tiles);
            AtomicUsize::new(first(head, q_tile * tiles.backward_q_tile))
        });
        Self {
            next: next.collect(),
            q_tiles,
        }
    }

    /// Returns the turns of the heads from `head` on.
    pub(super) fn of(&self, head: usize) -> Turns<'_> {
        Turns {
            next: &self.next[head * self.q_tiles..],
            q_tiles: self.q_tiles,
        }
    }
}

impl Turns<'_> {
    fn at(&self, member: usize, q_tile: usize) -> &AtomicUsize {
        &self.next[member * self.q_tiles + q_tile]
    }

    /// Waits until all tiles of keys before `k_tile` have passed on the turn.
    pub(super) fn wait(&self, member: usize, q_tile: usize, k_tile: usize) {
        let next = self.at(member, q_tile);
        let mut spins = 0;
        while next.load(Ordering::Acquire) != k_tile {
            spins += 1;
            match spins < SPINS {
                true => std::hint::spin_loop(),
                false => std::thread::yield_now(),
            }
        }
    }

    /// Passes the turn from `k_tile` to the next tile of keys.
    pub(super) fn pass_on(&self, member: usize, q_tile: usize, k_tile: usize) {
        self.at(member, q_tile).store(k_tile + 1, Ordering::Release);
    }
}
