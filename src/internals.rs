//! Kernels, and the calls and buffers of plans, for this crate's own benches and tests. Not part of the API: anything
//! here may change or be removed.

pub use crate::compile::arena::ALIGNMENT_BYTES;
pub use crate::compile::buffer::{Buffer, BufferId, Category, Location};
pub use crate::compile::op::{BufferRange, Call, Op};
pub use crate::kernels::attention::{KeyRanges, PerScore};
pub use crate::kernels::cpu::Stored;
pub use crate::kernels::cpu::parallel::TASK_ELEMENTS;
pub use crate::kernels::cpu::simd::multiply_adds;
pub use crate::kernels::{Activation, Gate, Norm, Update};
pub use crate::ops::lowering::{Accumulate, Kernel, Named};

/// Re-exports some functions and types of a CPU kernel's module.
macro_rules! some_of {
    ($($(::$parent:ident)* => $module:ident: $($item:ident),+;)+) => {$(
        pub mod $module {
            pub use crate::kernels::cpu$(::$parent)*::$module::{$($item),+};
        }
    )+};
}

some_of! {
    => activation: backward, forward;
    ::attention => flash: ForwardInputs, Gradients, Heads, Inputs, Masks, Outputs, Sizes, Tiles, backward, forward;
    => extremes: backward, forward;
    => gated: backward, forward;
    => gemm: Batched, MatRef, MatmulSizes, Threads, matmul, matmul_batched, packing_bytes, reserve_scratch;
    => heads: HeadSizes, split;
    => index: Sizes, gather, scatter_add, topk;
    => relu: backward, forward;
    => rope: rotate;
    => select: compare, select;
    => sums: backward, forward;
    => update: AdamW, Lion, Sgd, step;
    ::update => muon: Iteration, Scratch, orthogonalize;
    ::rows => cross_entropy: Terms, backward, forward;
    ::rows => embedding: backward, forward;
    ::rows => norm: Gradients, Inputs, OutputGradient, Outputs, backward, forward, partials_len;
    ::rows => softmax: backward, backward_from_scores, forward;
}
