//! Attention in the model's dimension, as plans have it: projections (B, T, H*Dh) are cut into heads, rotated to their
//! positions, compared and merged again without lying apart. Causal. Naive attention has as many heads of k and v as of
//! q there, and on the CPU rotates adjacent pairs.

#[cfg(feature = "cuda")]
mod gpu;

use super::attributes;
use super::flash::lowering::KERNELS;
#[cfg(feature = "cuda")]
use super::lowering::sizes;
use super::lowering::{dropout_mask, first_keys};
use crate::graph::Attribute;
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::attention::flash::{self, Heads, Tiles};
use crate::kernels::cpu::attention::rotary;
use crate::kernels::cpu::attention::rotary_heads::{self, Angles};
use crate::kernels::cpu::heads::{self, HeadSizes};
use crate::kernels::cpu::{Real, Stored};
use crate::kernels::{Dropout, Mask};
use crate::ops::dropout::of_attributes;
use crate::ops::lowering::{Kernel, Slices, kernel, on_gpu};
use crate::ops::rope::HALVES;
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
    /// The operands that q, k and v are in a call: one, or three.
    pub fn names<'n>(
        &self,
        packed: &'n [&'static str; 1],
        apart: &'n [&'static str; 3],
    ) -> &'n [&'static str] {
        if self.packed { packed } else { apart }
    }

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

    /// As naive attention's kernel on the CPU takes them.
    pub fn rotary(&self) -> rotary::Sizes {
        rotary::Sizes {
            heads: self.heads(),
            scale: self.scale,
        }
    }

    /// As the kernels on heads take them.
    fn heads(&self) -> HeadSizes {
        HeadSizes {
            batch: self.batch,
            length: self.length,
            heads: self.heads,
            head_dim: self.head_dim,
        }
    }

    /// The strides of a (B, T, heads*Dh), by batch, head, position and element.
    fn in_rows(&self, heads: usize) -> [usize; 4] {
        let row = heads * self.head_dim;
        [self.length * row, self.head_dim, row, 1]
    }

    /// Those of a (B, H, T, Dh).
    fn by_head(&self) -> [usize; 4] {
        let head = self.length * self.head_dim;
        [self.heads * head, head, self.head_dim, 1]
    }

    /// The sizes that a kernel has.
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
    /// what is packed on a GPU.
    pub fn rotate(&self) -> Kernel {
        let kernel = kernel!("rotate", of "x", |T, k, s| {
            let sizes = Self::of(k)?;
            let (heads, x) = (sizes.heads(), s.y::<T>("x")?);
            rotary_heads::rotate_in_place(heads, angles(s)?, sizes.by_halves, x);
        });
        let kernel = on_gpu!(kernel, |k, l| gpu::rotate(k, l, false));
        self.given_to(kernel).in_place()
    }

    /// Rotates gradients of rotated heads back, in place. Operands as [`rotate`](Self::rotate). On a GPU.
    pub fn rotate_back(&self) -> Kernel {
        let kernel = Kernel::of_gpus("rotate_back");
        let kernel = on_gpu!(kernel, |k, l| gpu::rotate(k, l, true));
        self.given_to(kernel).in_place()
    }

    /// Reads `x` (B, H, T, Dh); writes `y` (B, T, H*Dh).
    pub fn merge(&self) -> Kernel {
        let kernel = kernel!("merge_heads", |T, k, s| {
            heads::merge(Self::of(k)?.heads(), s.x::<T>("x")?, s.y("y")?);
        });
        self.given_to(kernel)
    }

    /// Reads `x` (B, H, T, Dh), `cos`, `sin`; writes `y` (B, T, H*Dh), rotated back.
    pub fn merge_rotated_back(&self) -> Kernel {
        let kernel = kernel!("merge_rotated_back", |T, k, s| {
            let (x, y) = (s.x::<T>("x")?, s.y("y")?);
            let sizes = Self::of(k)?;
            let heads = sizes.heads();
            rotary_heads::merge_rotated_back(heads, angles(s)?, sizes.by_halves, x, y);
        });
        self.given_to(kernel)
    }

    /// Naive attention with q and k rotated by the kernel. Reads `q`, `k`, `v` (B, T, H*Dh), `cos`, `sin` (T, Dh/2);
    /// writes `out` (B, T, H*Dh), `scratch` and, where backward wants it, `p` (its triangle). On the CPU.
    pub fn rotating(&self) -> Kernel {
        let kernel = kernel!("attention", |T, k, s| {
            let outputs = rotary::Outputs {
                p: s.some_y("p")?,
                out: s.y("out")?,
            };
            let inputs = rotated::<T>(s)?;
            rotary::forward(&Self::of(k)?.rotary(), inputs, outputs, s.y("scratch")?);
        });
        self.compared_by(kernel, 1.0)
    }

    /// Reads `d_out`, `q`, `k`, `v` (B, T, H*Dh), `p`, `cos`, `sin`; writes `dq`, `dk`, `dv` (B, T, H*Dh), `scratch`.
    /// On the CPU.
    pub fn rotating_backward(&self) -> Kernel {
        let kernel = kernel!("attention_backward", |T, k, s| {
            let gradients = rotary::Gradients {
                dq: s.y("dq")?,
                dk: s.y("dk")?,
                dv: s.y("dv")?,
            };
            let (p, d_out, scratch) = (s.x("p")?, s.x("d_out")?, s.y("scratch")?);
            let inputs = rotated::<T>(s)?;
            rotary::backward(&Self::of(k)?.rotary(), inputs, p, d_out, gradients, scratch);
        });
        self.compared_by(kernel, 2.0)
    }

    /// Naive attention on a GPU. Reads `q`, `k` (rotated), `v`, or all three as `qkv` where they are packed; writes
    /// `out` (B, T, H*Dh), the probabilities `p` (B, H, T, T) and, in half precision, the `scores` of some heads (..,
    /// T, T) in f32.
    pub fn naive(&self) -> Kernel {
        let kernel = Kernel::of_gpus("naive_attention");
        let kernel = on_gpu!(kernel, |k, l| gpu::naive(&Self::of(k)?, l));
        self.compared_by(kernel, 1.0)
    }

    /// Reads `d_out` (B, T, H*Dh), `q`, `k`, `v`, or `qkv`, the probabilities `p` (B, H, T, T); writes `dq`, `dk`,
    /// `dv`, or `dqkv`, as those lie, not rotated back, `dp` of some heads (.., T, T) in f32 and, in half precision,
    /// `dscores` of them (.., T, T). On a GPU.
    pub fn naive_backward(&self) -> Kernel {
        let kernel = Kernel::of_gpus("naive_attention_backward");
        let kernel = on_gpu!(kernel, |k, l| gpu::naive_backward(&Self::of(k)?, l));
        self.compared_by(kernel, 2.0)
    }

    /// Attention in tiles. Reads `q`, `k` (rotated), `v`, or `qkv`, `first_keys` (B, T) if there are any, and a
    /// `dropout_key` (4) where probabilities are dropped; writes `out`, `lse` (parts, B, H, T), on a GPU `workspace`
    /// and, in half precision where backward wants it, `rounding_error`, what rounding took from out (B, H, T, Dh). out
    /// is (B, H, T, Dh) on the CPU; on a GPU (B, T, H*Dh).
    pub fn tiled(&self) -> Kernel {
        let kernel = kernel!(KERNELS[0], |T, k, s| {
            let sizes = Self::of(k)?;
            let [q] = lying::<T, 1>(s, ["q"], sizes.in_rows(sizes.heads))?;
            let [k, v] = lying::<T, 2>(s, ["k", "v"], sizes.in_rows(sizes.kv_heads))?;
            let inputs = flash::ForwardInputs {
                q,
                k,
                v,
                first_keys: first_keys(s)?,
                dropout: dropout_mask(sizes.dropout, s, sizes.length)?,
            };
            let outputs = flash::Outputs {
                out: s.y("out")?,
                rounding_error: s.some_y("rounding_error")?.unwrap_or_default(),
                lse: s.y("lse")?,
            };
            let tiles = Tiles::for_head_dim(sizes.head_dim);
            flash::forward(&sizes.flash(), &tiles, inputs, outputs);
        });
        let kernel = on_gpu!(kernel, |k, l| gpu::tiled(k, l));
        self.compared_by(kernel, 1.0)
    }

    /// Reads `d_out`, `q`, `k`, `v`, or `qkv`, `out` (as forward wrote it), `lse` (parts, B, H, T), the `first_keys`
    /// and `dropout_key` that forward had and, in half precision, `rounding_error` (B, H, T, Dh); writes `dq`, `dk`,
    /// `dv`: (B, H, T, Dh) and twice (B, Hkv, T, Dh) on the CPU; on a GPU as q, k and v lie, and `workspace`.
    pub fn tiled_backward(&self) -> Kernel {
        let kernel = kernel!(KERNELS[1], |T, k, s| {
            let sizes = Self::of(k)?;
            let names = ["d_out", "q", "out"];
            let [d_out, q, out] = lying::<T, 3>(s, names, sizes.in_rows(sizes.heads))?;
            let [k, v] = lying::<T, 2>(s, ["k", "v"], sizes.in_rows(sizes.kv_heads))?;
            let inputs = flash::Inputs {
                d_out,
                q,
                k,
                v,
                out,
                rounding_error: match s.has_x("rounding_error") {
                    true => Some(lying::<T, 1>(s, ["rounding_error"], sizes.by_head())?[0]),
                    false => None,
                },
                lse: s.x("lse")?,
                first_keys: first_keys(s)?,
                dropout: dropout_mask(sizes.dropout, s, sizes.length)?,
            };
            let gradients = flash::Gradients {
                dq: s.y("dq")?,
                dk: s.y("dk")?,
                dv: s.y("dv")?,
            };
            let tiles = Tiles::for_head_dim(sizes.head_dim);
            flash::backward(&sizes.flash(), &tiles, inputs, gradients);
        });
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

fn angles<'a, R: Real>(s: &Slices<'a>) -> Result<Angles<'a, R>> {
    Ok(Angles {
        cos: s.x("cos")?,
        sin: s.x("sin")?,
    })
}

fn rotated<'a, T: Stored>(s: &Slices<'a>) -> Result<rotary::Inputs<'a, T>> {
    Ok(rotary::Inputs {
        q: s.x("q")?,
        k: s.x("k")?,
        v: s.x("v")?,
        angles: angles(s)?,
    })
}

/// What is read by these names, by these strides.
fn lying<'a, T: Stored, const N: usize>(
    s: &Slices<'a>,
    names: [&str; N],
    strides: [usize; 4],
) -> Result<[Heads<'a, T>; N]> {
    let mut all = [Heads { data: &[], strides }; N];
    for (heads, name) in all.iter_mut().zip(names) {
        heads.data = s.x::<T>(name)?;
    }
    Ok(all)
}
