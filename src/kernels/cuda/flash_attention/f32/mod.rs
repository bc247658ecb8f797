//! Flash attention of heads in f32 on tensor cores. A matmul is one in TF32, or three with about the accuracy of f32.
//! Launches are those of the kernels for every GPU.

mod tiles;

use super::kernel_config;
use crate::kernels::cuda::source::Source;
pub(super) use tiles::{Backward, row_bytes};

const FORWARD: Source = Source {
    name: "flash_forward_f32",
    parts: &[
        include_str!("../../philox.cuh"),
        include_str!("../../dropout.cuh"),
        include_str!("../common.cuh"),
        include_str!("../dropped.cuh"),
        include_str!("../masks.cuh"),
        include_str!("tf32.cuh"),
        include_str!("forward.cu"),
    ],
};
const BACKWARD: Source = Source {
    name: "flash_backward_f32",
    parts: &[
        include_str!("../../philox.cuh"),
        include_str!("../../dropout.cuh"),
        include_str!("../common.cuh"),
        include_str!("../dropped.cuh"),
        include_str!("../masks.cuh"),
        include_str!("../backward.cuh"),
        include_str!("tf32.cuh"),
        include_str!("backward.cu"),
    ],
};

/// Returns the forward kernel for a compiled head dimension.
pub(super) fn forward(head_dim: usize, tf32: bool, has_key_mask: bool) -> kernel_config::Forward {
    let tiles = tiles::Forward::new(head_dim, tf32, has_key_mask);
    kernel_config::Forward {
        source: &FORWARD,
        rows: tiles.rows,
        columns: tiles.columns,
        threads: 32 * tiles.warps,
        shared_bytes: tiles.shared_bytes(head_dim),
        tiles: tiles.definitions(),
    }
}

/// Returns the backward kernels for a compiled head dimension.
pub(super) fn backward(head_dim: usize, tf32: bool) -> kernel_config::Backward {
    let tiles = Backward::new(head_dim, tf32);
    kernel_config::Backward {
        source: &BACKWARD,
        keys: tiles.keys,
        queries: tiles.queries,
        threads: 32 * tiles.warps(),
        shared_bytes: tiles.shared_bytes(head_dim),
        finish: (256, 0),
        tiles: tiles.definitions(),
    }
}
