//! A kernel of a GPU, as it was recorded, and its name.

use crate::probe::Parts;
use std::sync::Arc;

/// A stretch of work on a GPU: a kernel, or memory that is copied or set.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The kernel's name, one of C++ as it was written, without parameters; in words for memory.
    pub name: Arc<str>,
    /// The stream that it was in.
    pub stream: u32,
    /// When it began on the GPU, after the recording's start.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Blocks along x, y and z; `None` for memory.
    pub grid: Option<[u32; 3]>,
    /// Threads of a block along x, y and z.
    pub block: Option<[u32; 3]>,
    /// The innermost range that the thread was in which launched it: an index of
    /// [`Recording::spans`](super::Recording::spans).
    pub span: Option<usize>,
}

/// What a kernel computes, as far as its name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelWork {
    /// Products of matrices: cuBLAS's kernels, and the sums of what they have split.
    Products,
    /// Softmax, or its gradient.
    Softmax,
    /// Both in one: flash attention.
    Attention,
    /// Anything else.
    Other,
}

/// What names of cuBLAS's products hold.
const OF_PRODUCTS: [&str; 7] = [
    "gemm",
    "nvjet",
    "cutlass",
    "xmma",
    "gemv",
    "splitkreduce",
    "dot_kernel",
];

impl Kernel {
    /// How long it ran.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// What it computes, by its name.
    pub fn work(&self) -> KernelWork {
        let name = self.name.to_ascii_lowercase();
        let is_loss = name.contains("log_softmax") || name.contains("cross_entropy");
        if OF_PRODUCTS.iter().any(|part| name.contains(part)) {
            KernelWork::Products
        } else if name.starts_with("flash") {
            KernelWork::Attention
        } else if name.contains("softmax") && !is_loss {
            KernelWork::Softmax
        } else {
            KernelWork::Other
        }
    }

    /// Its time, by what it computes.
    pub(super) fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        match self.work() {
            KernelWork::Products => parts.products_ns = self.duration_ns(),
            KernelWork::Softmax => parts.softmax_ns = self.duration_ns(),
            KernelWork::Attention => parts.fused_ns = self.duration_ns(),
            KernelWork::Other => {}
        }
        parts
    }
}

/// `8 x 32 x 1`, without what is 1 at the end.
pub(super) fn extent([x, y, z]: [u32; 3]) -> String {
    match (y, z) {
        (1, 1) => x.to_string(),
        (_, 1) => format!("{x}x{y}"),
        _ => format!("{x}x{y}x{z}"),
    }
}

/// A name in few words: no namespaces, no template arguments but the one in which CUTLASS says what it multiplies.
pub(super) fn short(name: &str) -> &str {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut words = name.split(|c| !is_word(c));
    if let Some(word) = words.find(|word| word.starts_with("cutlass_") && word.len() > 16) {
        return word;
    }
    let plain = name.split('<').next().unwrap_or(name);
    let plain = plain.rsplit("::").next().unwrap_or(plain).trim();
    if plain.is_empty() { name } else { plain }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_kernel_computes() {
        let kernel = |name: &str| Kernel {
            name: name.into(),
            stream: 0,
            start_ns: 1,
            end_ns: 3,
            grid: None,
            block: None,
            span: None,
        };
        for (name, work) in [
            (
                "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
                KernelWork::Products,
            ),
            (
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8",
                KernelWork::Products,
            ),
            (
                "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>",
                KernelWork::Products,
            ),
            (
                "cublasLt::splitKreduce_kernel<32, 16, int, float>",
                KernelWork::Products,
            ),
            ("softmax_forward_float", KernelWork::Softmax),
            ("softmax_backward_bf16", KernelWork::Softmax),
            ("flash_backward_hopper", KernelWork::Attention),
            ("log_softmax_float", KernelWork::Other),
            ("cross_entropy_forward_float", KernelWork::Other),
            ("swiglu_packed_forward_bf16", KernelWork::Other),
        ] {
            assert_eq!(kernel(name).work(), work, "{name}");
        }
    }

    #[test]
    fn long_names_are_shortened() {
        for (name, in_short) in [
            ("swiglu_forward_float", "swiglu_forward_float"),
            ("copy from host to GPU", "copy from host to GPU"),
            (
                "cublasLt::splitKreduce_kernel<32, 16, int>",
                "splitKreduce_kernel",
            ),
            (
                "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>",
                "cutlass_80_simt_sgemm_256x128_8x4_tn_align1",
            ),
        ] {
            assert_eq!(short(name), in_short);
        }
        assert_eq!(extent([8, 1, 1]), "8");
        assert_eq!(extent([8, 32, 1]), "8x32");
        assert_eq!(extent([8, 1, 2]), "8x1x2");
    }
}
