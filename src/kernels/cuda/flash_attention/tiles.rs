//! Tile sizes by head dimension, each the fastest of those tried on an H200.

use crate::kernels::Mask;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::source::Definition;
use crate::kernels::workspace::BIAS_GRADIENT_QUERIES;

/// Returns the head dimension that a kernel is compiled for: the smallest that holds Dh and Dv of the call.
pub(super) fn compiled_head_dim(sizes: &Sizes) -> usize {
    const COMPILED: [usize; 6] = [16, 32, 64, 96, 128, 256];
    let holds = COMPILED
        .into_iter()
        .find(|compiled| sizes.widest() <= *compiled);
    holds.unwrap_or(256)
}

/// Tiles of `forward.cu`.
pub(super) struct Forward {
    pub rows: usize,
    pub columns: usize,
    pub warps: usize,
    blocks_per_sm: usize,
    q_in_registers: usize,
}

impl Forward {
    pub(super) fn new(head_dim: usize, sees_all: bool) -> Self {
        let (rows, columns, warps, blocks_per_sm) = match head_dim {
            128 if sees_all => (256, 64, 8, 1),
            256 => (128, 32, 8, 1),
            _ => (128, 64, 4, 2),
        };
        Self {
            rows,
            columns,
            warps,
            blocks_per_sm,
            q_in_registers: usize::from(head_dim <= 64),
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("ROWS", self.rows),
            Definition::Size("COLUMNS", self.columns),
            Definition::Size("WARPS", self.warps),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
            Definition::Size("Q_IN_REGISTERS", self.q_in_registers),
        ]
    }

    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        (self.rows + 4 * self.columns) * head_dim * 2
    }
}

/// Tiles of `forward_hopper.cu`.
pub(super) struct ForwardHopper {
    pub groups_of_rows: usize,
    pub columns: usize,
}

impl ForwardHopper {
    /// Returns `None` for head dimensions without a Hopper kernel. `of_pairs` is whether there is a bias, for which
    /// three groups have too few registers, or a mask with rows, of which a smaller tile skips more. (H200, T 4096, Dh
    /// 64: 0.40 ms instead of 0.57 for a mask of blocks of 128; for padding 0.54 instead of 0.49.)
    pub(super) fn new(head_dim: usize, keys: usize, of_pairs: bool) -> Option<Self> {
        let (groups_of_rows, columns) = match head_dim {
            64 if keys > 1024 && !of_pairs => (3, 128),
            64 | 128 => (2, 128),
            256 => (2, 64),
            _ => return None,
        };
        Some(Self {
            groups_of_rows,
            columns,
        })
    }

    pub(super) fn rows(&self) -> usize {
        64 * self.groups_of_rows
    }

    /// One warpgroup copies, the others multiply.
    pub(super) fn threads(&self) -> usize {
        128 * (self.groups_of_rows + 1)
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("GROUPS_OF_ROWS", self.groups_of_rows),
            Definition::Size("COLUMNS", self.columns),
        ]
    }

    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let q_stages = if head_dim == 256 { 1 } else { 2 };
        (q_stages * self.rows() + 4 * self.columns) * head_dim * 2 + 1024 + 128
    }
}

/// Tiles of `backward.cu`.
pub(super) struct Backward {
    pub keys: usize,
    pub queries: usize,
    pub warps: usize,
    query_step: usize,
    warps_per_key_group: usize,
    dq_row_warps: usize,
    blocks_per_sm: usize,
}

impl Backward {
    pub(super) fn new(head_dim: usize) -> Self {
        let small = head_dim <= 64;
        let (keys, queries, warps_per_key_group) = match head_dim {
            256 => (64, 32, 2),
            128 => (128, 64, 2),
            _ => (128, 64, 1),
        };
        Self {
            keys,
            queries,
            warps: if small { 4 } else { 8 },
            query_step: 32.min(queries / warps_per_key_group),
            warps_per_key_group,
            dq_row_warps: if matches!(head_dim, 16 | 96) { 4 } else { 2 },
            blocks_per_sm: if small { 2 } else { 1 },
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("KEYS", self.keys),
            Definition::Size("QUERIES", self.queries),
            Definition::Size("QUERY_STEP", self.query_step),
            Definition::Size("WARPS", self.warps),
            Definition::Size("WARPS_PER_KEY_GROUP", self.warps_per_key_group),
            Definition::Size("DQ_ROW_WARPS", self.dq_row_warps),
            Definition::Size("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }

    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let row_bytes = head_dim * 2;
        (2 * self.keys + 4 * self.queries) * row_bytes
            + 4 * self.keys * self.queries
            + 16 * self.queries
            + 16
    }
}

/// Tiles of `backward_hopper.cu` and `backward_cluster.cu`.
pub(super) struct BackwardHopper {
    pub queries: usize,
    /// The blocks that share a tile of keys: a cluster, if there are two.
    pub cluster: usize,
}

impl BackwardHopper {
    /// Keys per tile.
    pub(super) const KEYS: usize = 128;

    /// Returns `None` for head dimensions without a Hopper kernel.
    pub(super) fn new(head_dim: usize) -> Option<Self> {
        let (queries, cluster) = match head_dim {
            64 => (128, 1),
            128 => (64, 1),
            256 => (64, 2),
            _ => return None,
        };
        Some(Self { queries, cluster })
    }

    /// Returns the number of heads of concurrent blocks. With more blocks per head, more of its queries and dQ are in
    /// the level-2 cache, but blocks wait longer to add to dQ. (H200, T 512 to 16k; Dh 256 from T 1k on.)
    pub(super) fn heads_at_once(&self, sizes: &Sizes) -> usize {
        let query_tiles = sizes.queries.div_ceil(self.queries).max(1);
        match sizes.mask {
            Mask::Full if self.cluster == 2 => (256 / query_tiles).clamp(2, 16),
            _ if self.cluster == 2 => ((1 << 15) / sizes.keys.max(1)).clamp(4, 16),
            Mask::Full => (512 / query_tiles).clamp(4, 64),
            Mask::Causal | Mask::CausalEnd | Mask::Window(_) => {
                let most = if query_tiles > 8 { 32 } else { 64 };
                ((1 << 17) / sizes.keys.max(1)).clamp(4, most)
            }
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        vec![
            Definition::Size("KEYS", Self::KEYS),
            Definition::Size("QUERIES", self.queries),
        ]
    }

    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        let (rows, bytes_a_pair) = match self.cluster {
            1 => (3 * Self::KEYS + 6 * self.queries, 4),
            _ => (5 * Self::KEYS / 4 + 3 * self.queries, 6),
        };
        rows * head_dim * 2
            + Self::KEYS * self.queries * bytes_a_pair
            + self.queries * 16
            + 1024
            + 256
    }
}

/// Tiles of `bias_gradient.cu`.
pub(super) struct BiasGradient {
    pub keys: usize,
    pub shared_bytes: usize,
    /// The accuracy of f32.
    of_f32: Vec<Definition>,
}

impl BiasGradient {
    pub(super) const THREADS: usize = 128;

    pub(super) fn of_half(head_dim: usize) -> Self {
        let keys = if head_dim <= 128 { 64 } else { 32 };
        Self::new(keys, 2 * head_dim, Vec::new())
    }

    pub(super) fn of_f32(head_dim: usize, tf32: bool) -> Self {
        let keys = if head_dim <= 64 { 64 } else { 32 };
        let of_f32 = super::f32::Backward::new(head_dim, tf32).accuracy();
        Self::new(keys, super::f32::row_bytes(head_dim), of_f32)
    }

    /// Four tiles, in whose memory the sums are reduced.
    fn new(keys: usize, row_bytes: usize, of_f32: Vec<Definition>) -> Self {
        let tiles = 2 * (BIAS_GRADIENT_QUERIES + keys) * row_bytes;
        let sums = 4 * BIAS_GRADIENT_QUERIES * (keys + 1);
        Self {
            keys,
            shared_bytes: tiles.max(sums),
            of_f32,
        }
    }

    pub(super) fn definitions(&self) -> Vec<Definition> {
        let mut definitions = self.of_f32.clone();
        definitions.push(Definition::Size("KEYS", self.keys));
        definitions.push(Definition::Size("QUERIES", BIAS_GRADIENT_QUERIES));
        definitions
    }
}
