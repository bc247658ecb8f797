//! Flash attention of heads in f32, on tensor cores: products in TF32, or each as three of them, which is about as
//! near as f32's own.
//!
//! What lives here: its kernels, and what they are compiled with for a head dimension. What does not: the launches,
//! which are those of the kernels for every GPU.

mod tiles;

use super::form::{Backward, Forward};
use crate::kernels::cuda::source::Source;

const FORWARD: Source = Source {
    name: "flash_forward_f32",
    parts: &[
        include_str!("../../philox.cuh"),
        include_str!("../../dropout.cuh"),
        include_str!("../common.cuh"),
        include_str!("../dropped.cuh"),
        include_str!("products.cuh"),
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
        include_str!("products.cuh"),
        include_str!("backward.cu"),
    ],
};

/// The forward for a compiled head dimension.
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

/// The backward for a compiled head dimension.
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
