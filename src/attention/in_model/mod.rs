//! Attention in the model's dimension, as plans for GPUs have it: projections (B, T, H*Dh) are cut into heads, rotated
//! to their positions, compared and merged again without lying apart. Causal. Naive attention has as many heads of k
//! and v as of q there.

#[cfg(feature = "cuda")]
mod gpu;
mod lowering;

pub(crate) use lowering::ModelAttention;

use super::attributes;
use super::flash::lowering::KERNELS;
#[cfg(feature = "cuda")]
use super::lowering::sizes;
use crate::graph::Attribute;
use crate::kernels::attention::Sizes;
use crate::kernels::{Dropout, Mask};
#[cfg(any(feature = "cuda", test))]
use crate::ops::dropout::of_attributes;
use crate::ops::lowering::{Kernel, on_gpu};
use crate::ops::rope::HALVES;
#[cfg(any(feature = "cuda", test))]
use candle_core::Result;

/// The sizes of attention in a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InModel {
    /// B.
    pub batch: usize,
    /// T.
    pub length: usize,
    /// H.
    pub heads: usize,
    /// Hkv: heads of k and v, each of which serves H / Hkv heads of q.
    pub kv_heads: usize,
    /// Dh.
    pub head_dim: usize,
    /// Which keys a query sees: a causal mask.
    pub mask: Mask,
    /// What scores are multiplied by.
    pub scale: f64,
    /// What is dropped of the probabilities: by [`tiled`](Self::tiled) alone.
    pub dropout: Option<Dropout>,
    /// Whether element i of a head rotates with element i + Dh/2, not with its neighbour.
    pub by_halves: bool,
    /// Whether q, k and v lie beside each other in the rows of one buffer, (B, T, (H + 2 Hkv)*Dh), and their gradients
    /// too; else they are three, (B, T, H*Dh) and twice (B, T, Hkv*Dh).
    pub packed: bool,
}

impl InModel {
    /// As flash attention's kernels take them.
    pub fn flash(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
            queries: self.length,
            keys: self.length,
            head_dim: self.head_dim,
            value_dim: self.head_dim,
            mask: self.mask,
            scale: self.scale,
        }
    }

    /// The columns of q, k and v in the rows of positions.
    pub fn columns(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_dim)
    }

    /// Of the heads of q, k or v alone.
    pub fn only(&self, heads: usize) -> Self {
        Self {
            heads,
            kv_heads: heads,
            ..*self
        }
    }

    /// The sizes that a kernel has.
    #[cfg(any(feature = "cuda", test))]
    pub fn of(k: &Kernel) -> Result<Self> {
        Ok(Self {
            batch: k.count("B")?,
            length: k.count("T")?,
            heads: k.count("H")?,
            kv_heads: k.count("Hkv")?,
            head_dim: k.count("Dh")?,
            mask: k.mask()?,
            scale: k.number("scale")?,
            dropout: of_attributes(k.attributes()),
            by_halves: k.flag(HALVES),
            packed: k.flag("packed"),
        })
    }

    fn given_to(&self, kernel: Kernel) -> Kernel {
        let sizes = [
            ("B", self.batch),
            ("T", self.length),
            ("H", self.heads),
            ("Hkv", self.kv_heads),
            ("Dh", self.head_dim),
        ];
        let kernel = kernel.sized(sizes);
        let kernel = kernel.with_all(&attributes(self.scale, self.mask, self.dropout));
        let flags = [(HALVES, self.by_halves), ("packed", self.packed)];
        let flags = flags.into_iter().filter(|(_, set)| *set);
        flags.fold(kernel, |kernel, (name, _)| {
            kernel.with(name, Attribute::Flag(true))
        })
    }

    /// Of a kernel that compares all positions, `passes` times two products.
    fn compared_by(&self, kernel: Kernel, passes: f64) -> Kernel {
        let sizes = [self.batch, self.heads, self.length, self.length];
        let scores: f64 = sizes.iter().map(|n| *n as f64).product();
        let flops = 4.0 * passes * scores * self.head_dim as f64;
        self.given_to(kernel).costing(flops).scoring(scores)
    }

    /// Rotates heads to their positions, in place. Reads `cos`, `sin` (T, Dh/2); writes `x` (B, T, H*Dh), or q and k of
    /// what is packed.
    pub fn rotate(&self) -> Kernel {
        let kernel = Kernel::of_gpus("rotate");
        let kernel = on_gpu!(kernel, |k, l| gpu::rotate(k, l, false));
        self.given_to(kernel).in_place()
    }

    /// Rotates gradients of rotated heads back, in place. Operands as [`rotate`](Self::rotate).
    pub fn rotate_back(&self) -> Kernel {
        let kernel = Kernel::of_gpus("rotate_back");
        let kernel = on_gpu!(kernel, |k, l| gpu::rotate(k, l, true));
        self.given_to(kernel).in_place()
    }

    /// Naive attention. Reads `q`, `k` (rotated), `v`, or all three as `qkv` where they are packed; writes
    /// `out` (B, T, H*Dh), the probabilities `p` (B, H, T, T) and, in half precision, the `scores` of some heads (..,
    /// T, T) in f32.
    pub fn naive(&self) -> Kernel {
        let kernel = Kernel::of_gpus("naive_attention");
        let kernel = on_gpu!(kernel, |k, l| gpu::naive(&Self::of(k)?, l));
        self.compared_by(kernel, 1.0)
    }

    /// Reads `d_out` (B, T, H*Dh), `q`, `k`, `v`, or `qkv`, the probabilities `p` (B, H, T, T); writes `dq`, `dk`,
    /// `dv`, or `dqkv`, as those lie, not rotated back, `dp` of some heads (.., T, T) in f32 and, in half precision,
    /// `dscores` of them (.., T, T).
    pub fn naive_backward(&self) -> Kernel {
        let kernel = Kernel::of_gpus("naive_attention_backward");
        let kernel = on_gpu!(kernel, |k, l| gpu::naive_backward(&Self::of(k)?, l));
        self.compared_by(kernel, 2.0)
    }

    /// Attention in tiles. Reads `q`, `k` (rotated), `v`, or `qkv`, `first_keys` (B, T) if there are any, and a
    /// `dropout_key` (4) where probabilities are dropped; writes `out`, `lse` (parts, B, H, T), `workspace` and,
    /// in half precision where backward wants it, `rounding_error`, what rounding took from out (B, H, T, Dh). out is
    /// (B, T, H*Dh).
    pub fn tiled(&self) -> Kernel {
        let kernel = Kernel::of_gpus(KERNELS[0]);
        let kernel = on_gpu!(kernel, |k, l| gpu::tiled(k, l));
        self.compared_by(kernel, 1.0)
    }

    /// Reads `d_out`, `q`, `k`, `v`, or `qkv`, `out` (as forward wrote it), `lse` (parts, B, H, T), the `first_keys`
    /// and `dropout_key` that forward had and, in half precision, `rounding_error` (B, H, T, Dh); writes `dq`, `dk`,
    /// `dv`, as q, k and v lie, and `workspace`.
    pub fn tiled_backward(&self) -> Kernel {
        let kernel = Kernel::of_gpus(KERNELS[1]);
        let kernel = on_gpu!(kernel, |k, l| gpu::tiled_backward(k, l));
        self.compared_by(kernel, 2.0)
    }
}

/// The sizes of a planned call that is flash attention, in a model or on heads.
#[cfg(feature = "cuda")]
pub(crate) fn planned_flash_sizes(kernel: &Kernel) -> Option<Sizes> {
    let is_flash = KERNELS.contains(&kernel.name());
    let in_model = |_| InModel::of(kernel).map(|sizes| sizes.flash());
    is_flash
        .then(|| sizes(kernel).or_else(in_model).ok())
        .flatten()
}
