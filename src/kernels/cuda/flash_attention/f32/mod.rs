//! Flash attention of heads in f32 on tensor cores. A matmul is one in TF32, or three with about the accuracy of f32.
//! Launches are those of the kernels for every GPU.

mod tiles;

use super::kernel_config::{Backward, Forward};
use crate::kernels::cuda::source::Source;

const FORWARD: Source = Source {
    name: "flash_forward_f32",
    parts: &[
        include_str!("../../philox.cuh"),
        include_str!("../../dropout.cuh"),
        include_str!("../common.cuh"),
        include_str!("../dropped.cuh"),
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
        include_str!("../backward.cuh"),
        include_str!("tf32.cuh"),
        include_str!("backward.cu"),
    ],
};

/// Returns the forward kernel for a compiled head dimension.
pub(super) fn forward(head_dim: usize, tf32: bool) -> Forward {
    let tiles = tiles::Forward::new(head_dim, tf32);
    Forward {
        source: &FORWARD,
        rows: tiles.rows,
        threads: 32 * tiles.warps,
        shared_bytes: tiles.shared_bytes(head_dim),
        tiles: tiles.definitions(),
    }
}

/// Returns the backward kernels for a compiled head dimension.
pub(super) fn backward(head_dim: usize, tf32: bool) -> Backward {
    let tiles = tiles::Backward::new(head_dim, tf32);
    Backward {
        source: &BACKWARD,
        keys: tiles.keys,
        queries: tiles.queries,
        threads: 32 * tiles.warps(),
        shared_bytes: tiles.shared_bytes(head_dim),
        finish: (256, 0),
        tiles: tiles.definitions(),
    }
}
