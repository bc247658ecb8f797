//! The sizes of attention, in calls and as kernels take them.

use crate::kernels::Mask;
use crate::kernels::attention::Sizes;
#[doc(inline)]
pub use crate::kernels::cpu::attention::blocked::Sizes as HeadAttentionSizes;
use crate::kernels::cpu::attention::rotary;
use crate::kernels::cpu::heads::HeadSizes;

/// The sizes of attention in a model: causal, as many heads of k and v as of q.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSizes {
    /// B.
    pub batch: usize,
    /// T.
    pub length: usize,
    /// H.
    pub heads: usize,
    /// Dh.
    pub head_dim: usize,
    /// What scores are multiplied by.
    pub scale: f64,
    /// Whether q, k and v lie beside each other in the rows of one buffer, (B, T, 3*H*Dh), and their gradients too;
    /// else they are three, (B, T, H*Dh) each.
    pub packed: bool,
}

impl AttentionSizes {
    /// The operands that q, k and v are in a call: one, or three.
    pub(super) fn names<'n>(
        &self,
        packed: &'n [&'static str; 1],
        apart: &'n [&'static str; 3],
    ) -> &'n [&'static str] {
        if self.packed { packed } else { apart }
    }

    /// As the kernels on heads take them.
    pub(super) fn heads(&self) -> HeadSizes {
        HeadSizes {
            batch: self.batch,
            length: self.length,
            heads: self.heads,
            head_dim: self.head_dim,
        }
    }

    /// As flash attention's kernels take them.
    pub(super) fn flash(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.heads,
            queries: self.length,
            keys: self.length,
            head_dim: self.head_dim,
            value_dim: self.head_dim,
            mask: Mask::Causal,
            scale: self.scale,
        }
    }

    /// As naive attention's kernel on the CPU takes them.
    pub(super) fn rotary(&self) -> rotary::Sizes {
        rotary::Sizes {
            heads: self.heads(),
            scale: self.scale,
        }
    }
}
