//! How large the tiles are.

/// The tiles of a call; chosen by shape, so that the bits depend on nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Queries of a task in forward: K and V are read once for all of them.
    pub forward_q_tile: usize,
    /// Keys whose scores are in cache at a time in forward.
    pub forward_k_tile: usize,
    /// Queries at a time in backward.
    pub backward_q_tile: usize,
    /// Keys of a tile in backward, whose dk and dv stay in cache while all queries pass.
    pub backward_k_tile: usize,
}

impl Tiles {
    /// For heads of `head_dim` elements.
    ///
    /// In forward, the scores, Q and O of a panel of 48 queries come to a first-level cache of 48 KiB at Dh 64. In
    /// backward five tiles of keys are at hand, which are kept to 500 KiB of f32, half a second-level cache of 1 MiB.
    /// Within these bounds the time hardly depends on the sizes: forward differed by 3%, backward by 5% between half
    /// and twice of each.
    pub fn for_head_dim(head_dim: usize) -> Self {
        Self {
            forward_q_tile: 192,
            forward_k_tile: 128,
            backward_q_tile: 64,
            backward_k_tile: if head_dim <= 128 { 192 } else { 96 },
        }
    }
}
