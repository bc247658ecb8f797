//! Size limits of the CUDA kernels, available without a GPU.

/// The widest row that the norm kernels accept: the threads of a block hold it in registers.
pub(crate) const NORM_WIDTH: usize = 8192;

/// The most classes that the cross-entropy kernels accept: as many as the grid of backward covers in f32.
pub(crate) const CROSS_ENTROPY_CLASSES: usize = 65_535 * 4 * 256 * 4;
