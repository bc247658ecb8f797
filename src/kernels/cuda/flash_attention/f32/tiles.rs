//! Tile sizes by head dimension, each the fastest of those tried on an H200.

use super::pitch;
use crate::kernels::cuda::source::Definition;

/// Of `forward.cu`.
pub(super) struct Forward {
    pub rows: usize,
    columns: usize,
    pub warps: usize,
    blocks_per_sm: usize,
}

impl Forward {
    pub(super) fn new(head_dim: usize) -> Self {
        let (columns, warps, blocks_per_sm) = match head_dim {
            96 => (32, 4, 2),
            128 => (64, 8, 1),
            256 => (32, 8, 1),
            _ => (64, 4, 2),
        };
        Self {
            rows: 128,
            columns,
            warps,
            blocks_per_sm,
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("ROWS", self.rows),
            Definition::Size("COLUMNS", self.columns),
            Definition::Size("WARPS", self.warps),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }

    /// Q, K and V, and P on its way from lane to lane.
    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let heads = (self.rows + 2 * self.columns) * pitch(head_dim);
        4 * (heads + self.rows * pitch(self.columns))
    }
}

/// Numbers that `backward.cu` has of a query: lse, delta, and what rounding took from lse.
const STATISTICS: usize = 3;

/// Of `backward.cu`.
pub(super) struct Backward {
    pub keys: usize,
    pub queries: usize,
    pub warps: usize,
    dq_row_warps: usize,
    blocks_per_sm: usize,
}

impl Backward {
    pub(super) fn new(head_dim: usize) -> Self {
        let (queries, warps, dq_row_warps, blocks_per_sm) = match head_dim {
            32 => (64, 4, 2, 2),
            96 => (32, 4, 4, 2),
            128 => (64, 8, 2, 1),
            256 => (32, 8, 2, 1),
            _ => (64, 4, 4, 2),
        };
        Self {
            keys: 64,
            queries,
            warps,
            dq_row_warps,
            blocks_per_sm,
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("KEYS", self.keys),
            Definition::Size("QUERIES", self.queries),
            Definition::Size("STATISTICS", STATISTICS),
            Definition::Size("WARPS", self.warps),
            Definition::Size("DQ_ROW_WARPS", self.dq_row_warps),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }

    /// K, V, Q and dO, P and dS on their way, statistics of the queries, and a ticket.
    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let heads = 2 * (self.keys + self.queries) * pitch(head_dim);
        let exchanged = 2 * self.keys * pitch(self.queries);
        4 * (heads + exchanged + STATISTICS * self.queries) + 16
    }
}
