//! Whose turn it is to add to a tile of dq.

use super::Tiles;
use std::sync::atomic::{AtomicUsize, Ordering};

/// For every tile of queries, which tile of keys adds to its dq next: the tiles of keys add in order, whichever is
/// first.
///
/// Nobody waits in vain as long as tasks are begun in the order of their tiles of keys: the one that is waited for has
/// begun, and waits itself only for earlier ones.
pub(super) struct AllTurns {
    /// (heads of q, tiles of queries).
    next: Vec<AtomicUsize>,
    q_tiles: usize,
}

/// Those of some heads of q.
#[derive(Clone, Copy)]
pub(super) struct Turns<'a> {
    next: &'a [AtomicUsize],
    q_tiles: usize,
}

/// Looks at the counter before the thread lets others run: a tile of queries takes some ten microseconds.
const SPINS: usize = 10_000;

impl AllTurns {
    /// The turn of tile `first(head, query)` of keys at the tile of queries that begins with `query`.
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

    /// Those of the heads from `head`.
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

    /// Returns when all tiles of keys before `k_tile` have passed on.
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

    /// Lets the tile of keys after `k_tile` have its turn.
    pub(super) fn pass_on(&self, member: usize, q_tile: usize, k_tile: usize) {
        self.at(member, q_tile).store(k_tile + 1, Ordering::Release);
    }
}
