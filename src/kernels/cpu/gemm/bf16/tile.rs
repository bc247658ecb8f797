//! Tiles, and blocks of them: what a unit multiplies.

use half::bf16;

/// Rows or columns of a tile.
pub(in super::super) const SIDE: usize = 16;

/// Elements of the depth in a tile.
pub(super) const DEPTH: usize = 32;

/// Pairs of the depth in a tile.
pub(super) const PAIRS: usize = DEPTH / 2;

/// Elements of a tile of a factor.
pub(super) const TILE: usize = SIDE * DEPTH;

/// Rows and columns of the largest block that a unit computes.
pub(super) const BLOCK: usize = 2 * SIDE;

/// The packed factors of a block.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    /// Panels of a.
    pub a: *const bf16,
    /// From one to the next.
    pub a_panel: usize,
    /// Panels of b.
    pub b: *const bf16,
    /// From one to the next.
    pub b_panel: usize,
    /// Tiles of a panel.
    pub steps: usize,
}

/// The tiles of a block of c: one or two in each direction.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub rows: usize,
    pub columns: usize,
}
