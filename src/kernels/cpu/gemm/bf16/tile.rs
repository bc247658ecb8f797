//! Tile and block sizes of the bf16 units.

use half::bf16;

/// The number of rows or columns of a tile.
pub(in super::super) const SIDE: usize = 16;

/// The depth of a tile.
pub(super) const DEPTH: usize = 32;

/// The number of pairs in the depth of a tile.
pub(super) const PAIRS: usize = DEPTH / 2;

/// The number of elements in a tile of a factor.
pub(super) const TILE: usize = SIDE * DEPTH;

/// The number of rows and columns of the largest block that a unit computes.
pub(super) const BLOCK: usize = 2 * SIDE;

#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub a: *const bf16,
    /// The stride from one panel of a to the next.
    pub a_panel: usize,
    pub b: *const bf16,
    /// The stride from one panel of b to the next.
    pub b_panel: usize,
    /// The number of tiles in a panel.
    pub steps: usize,
}

/// The tiles of a block of c: one or two in each direction.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub rows: usize,
    pub columns: usize,
}
