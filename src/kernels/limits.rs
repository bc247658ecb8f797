//! The largest sizes that kernels for GPUs take, known before there is a GPU.

/// The widest row that norms' kernels take: the threads of a block hold it in their registers.
pub(crate) const NORM_WIDTH: usize = 8192;

/// The most classes that cross-entropy's kernels take: what the backward's grid reaches, in f32.
pub(crate) const CROSS_ENTROPY_CLASSES: usize = 65_535 * 4 * 256 * 4;
