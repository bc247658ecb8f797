//! Tile sizes by head dimension, each the fastest of those tried on an H200.

use crate::kernels::cuda::source::Definition;

/// Returns the floats from row to row of a tile in shared memory: 16 bytes more than a row, against bank conflicts.
fn pitch(columns: usize) -> usize {
    columns + 4
}

/// Returns the bytes from row to row of a tile in shared memory.
pub(in super::super) fn row_bytes(head_dim: usize) -> usize {
    4 * pitch(head_dim)
}

/// Returns the number of matmuls in TF32 per matmul.
fn tf32_matmuls(tf32: bool) -> usize {
    if tf32 { 1 } else { 3 }
}

/// Tiles of `forward.cu`.
pub(super) struct Forward {
    tf32: bool,
    pub rows: usize,
    pub columns: usize,
    pub warps: usize,
    blocks_per_sm: usize,
}

impl Forward {
    /// A key mask has flags of tiles of at least 32 keys.
    pub(super) fn new(head_dim: usize, tf32: bool, has_key_mask: bool) -> Self {
        let (rows, columns, warps, blocks_per_sm) = match head_dim {
            256 if has_key_mask => (64, 32, 4, 1),
            256 => (128, 16, 8, 1),
            96 | 128 if tf32 => (128, 64, 8, 1),
            128 => (128, 32, 8, 1),
            96 => (128, 32, 4, 2),
            _ => (128, 64, 4, 2),
        };
        Self {
            tf32,
            rows,
            columns,
            warps,
            blocks_per_sm,
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("TF32_MATMULS", tf32_matmuls(self.tf32)),
            Definition::Size("ROWS", self.rows),
            Definition::Size("COLUMNS", self.columns),
            Definition::Size("WARPS", self.warps),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }

    /// Returns the bytes of Q, and of two stages of K and V.
    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        4 * (self.rows + 4 * self.columns) * pitch(head_dim)
    }
}

/// Tiles of `backward.cu`.
pub(in super::super) struct Backward {
    tf32: bool,
    pub keys: usize,
    pub queries: usize,
    warps_per_key_group: usize,
    blocks_per_sm: usize,
}

impl Backward {
    pub(in super::super) fn new(head_dim: usize, tf32: bool) -> Self {
        let (queries, warps_per_key_group, blocks_per_sm) = match head_dim {
            16 | 32 => (128, 1, 2),
            64 => (64, 1, 2),
            256 => (32, 2, 1),
            _ => (32, 1, 2),
        };
        Self {
            tf32,
            keys: 64,
            queries,
            warps_per_key_group,
            blocks_per_sm,
        }
    }

    /// Each warp has 16 keys, or shares them with another that has other columns.
    pub(super) fn warps(&self) -> usize {
        self.keys / 16 * self.warps_per_key_group
    }

    /// Returns the statistics per query: lse, delta, and the rounding error of lse, which is negligible next to TF32's.
    fn statistics(&self) -> usize {
        if self.tf32 { 2 } else { 3 }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        let mut definitions = self.accuracy();
        definitions.extend([
            Definition::Size("KEYS", self.keys),
            Definition::Size("QUERIES", self.queries),
            Definition::Size("WARPS_PER_KEY_GROUP", self.warps_per_key_group),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
        ]);
        definitions
    }

    /// Returns the definitions that do not depend on tiles.
    pub(in super::super) fn accuracy(&self) -> Vec<Definition> {
        vec![
            Definition::Size("TF32_MATMULS", tf32_matmuls(self.tf32)),
            Definition::Size("STATISTICS", self.statistics()),
        ]
    }

    /// Returns the bytes of K, V, Q, dO, dS, the statistics of the queries, and a ticket.
    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let heads = 2 * (self.keys + self.queries) * pitch(head_dim);
        let d_scores = self.keys * pitch(self.queries);
        4 * (heads + d_scores + self.statistics() * self.queries) + 16
    }
}
